"""A folder of checkpoints: which are in it, which are whole, and what is done with the others."""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from jaxtpu.checkpoint import manifest
from jaxtpu.config import CheckpointConfig
from jaxtpu.errors import UserError
from jaxtpu.processes import agree, primary

RUN = "run"  # JSON: the run that the checkpoint is of
_LOG = "saved.jsonl"
_DAMAGED, _DELETED, _TEMPORARY = ".damaged", ".deleted", ".orbax-checkpoint-tmp"


class Folder:
    """The checkpoints in a folder, each named by its step.

    Args:
      directory: need not exist.
      tell: is given a line about each checkpoint that is damaged.
    """

    def __init__(self, directory: epath.Path, tell: Callable[[str], None] = print):
        self.directory, self.tell = directory, tell

    @property
    def steps(self) -> list[int]:
        """The steps whose checkpoints are finished, oldest first; their content is not verified."""
        return [step for step in self._all() if manifest.is_finished(self.directory / str(step))]

    @property
    def latest_step(self) -> int | None:
        return next(reversed(self.steps), None)

    @property
    def kept(self) -> str:
        """The steps that are kept, as a list to read."""
        return ", ".join(map(str, self.steps))

    def _all(self) -> list[int]:
        """Every folder that has a step's name, finished or not."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def newest_whole(self, set_aside: bool = True) -> int | None:
        """The newest step whose every file is what was written; None where none was ever saved.

        Args:
          set_aside: whether damaged ones get a name by which they are not taken again.

        Raises:
          UserError: checkpoints were saved, and none is whole.
        """
        found = self._find_whole(set_aside) if primary() else (None, "")
        step, problem = agree("newest whole checkpoint", found)
        if problem:
            raise UserError(problem)
        return step

    def _find_whole(self, set_aside: bool) -> tuple[int | None, str]:
        if set_aside:
            self.remove_leftovers()
        for step in reversed(self._all()):
            path = self.directory / str(step)
            found = manifest.faults(path)
            if not found:
                return step, ""
            done = f"; it is now {rename_aside(path).name}" if set_aside else ""
            self.tell(f"WARNING: the checkpoint of step {step} is damaged: {_listed(found)}{done}.")
        if saved := self._saved():
            return None, (
                f"no checkpoint in {self.directory} is whole, though those of steps "
                f"{', '.join(map(str, saved))} were saved. To begin again from step 0, choose "
                "another --workdir, or delete that folder."
            )
        return None, ""

    def _saved(self) -> list[int]:
        """The steps that were ever saved to the end and not deleted since: from the log."""
        steps = set()
        with contextlib.suppress(OSError, ValueError):
            for line in (self.directory / _LOG).read_text().splitlines():
                event = json.loads(line)
                (steps.add if event["event"] == "saved" else steps.discard)(event["step"])
        return sorted(steps)

    def log(self, event: str, step: int) -> None:
        line = json.dumps({"event": event, "step": step, "time": round(time.time(), 3)})
        path = self.directory / _LOG
        before = path.read_text() if path.exists() else ""  # buckets have no append
        partial = self.directory / (_LOG + ".partial")
        partial.write_text(f"{before}{line}\n")
        partial.replace(path)

    def remove_leftovers(self) -> None:
        """What a killed process was writing or deleting."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if _TEMPORARY in path.name or path.name.endswith(_DELETED):
                path.rmtree()

    def delete(self, step: int) -> None:
        """Deletes a checkpoint; a half-deleted one has another name."""
        path = self.directory / str(step)
        gone = path.parent / (path.name + _DELETED)
        path.rename(gone)
        self.log("deleted", step)
        gone.rmtree()

    def read_run(self, step: int) -> dict[str, Any]:
        """What is stored about the run: `config`, `versions`, `structure`, `metric`, `time`."""
        return json.loads((self.directory / str(step) / RUN / "run.json").read_text())


def directory_of(workdir: str, config: CheckpointConfig) -> epath.Path:
    """Where the checkpoints of a run are; a bucket's `gs://...` as well."""
    chosen = config.directory or str(epath.Path(workdir).expanduser() / "checkpoints")
    path = epath.Path(chosen)
    return path if "://" in chosen else epath.Path(path.expanduser().absolute())


def rename_aside(path: epath.Path) -> epath.Path:
    names = (f"{path.name}{_DAMAGED}{n or ''}" for n in range(1000))
    new = next(aside for name in names if not (aside := path.parent / name).exists())
    path.rename(new)
    return new


def _listed(found: list[str]) -> str:
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
