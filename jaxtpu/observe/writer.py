"""Where numbers go: `metrics.jsonl` for programs, TensorBoard for people."""

import json
import pathlib

from jaxtpu.data.quiet_tensorflow import import_tensorflow


class MetricWriter:
    """Writes metrics of a step to `<workdir>/metrics.jsonl` and `<workdir>/tensorboard`.

    Args:
      workdir: made where it does not exist.
      start: steps done before; lines of later steps, of a run that went further than its last
        checkpoint, are dropped, so that each step stands once.
      writes: False for a process whose numbers another one writes: this one writes nothing.
    """

    def __init__(self, workdir: str, start: int, writes: bool = True):
        self._writes = writes
        self.path = pathlib.Path(workdir).expanduser() / "metrics.jsonl"
        self.tensorboard = self.path.parent / "tensorboard"
        if not writes:
            return
        tf = import_tensorflow()
        kept = [line for line in _lines(self.path) if line["step"] <= start]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(self.path)
        self._file = self.path.open("a", buffering=1)
        self._tf = tf
        self._events = tf.summary.create_file_writer(str(self.tensorboard))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Values of one step; names with a slash are grouped by TensorBoard."""
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        with self._events.as_default(step):
            for name, value in values.items():
                self._tf.summary.scalar(name, value)

    def text(self, name: str, text: str) -> None:
        if not self._writes:
            return
        with self._events.as_default(0):
            self._tf.summary.text(name, f"```\n{text}\n```")

    def close(self) -> None:
        if not self._writes:
            return
        self._file.close()
        self._events.close()


def _lines(path: pathlib.Path) -> list[dict]:
    """The whole lines of a metrics file; a killed process may leave half a line."""
    lines = []
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    return lines
