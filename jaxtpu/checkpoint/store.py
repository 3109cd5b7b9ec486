"""The checkpoints of one run: the state, the step, the data position and the run as one unit."""

import contextlib
import json
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import absl.logging
import flax
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath

from jaxtpu.checkpoint import manifest
from jaxtpu.checkpoint.policy import Retention
from jaxtpu.checkpoint.structure import Structure, check_structure, structure_of
from jaxtpu.config import CheckpointConfig
from jaxtpu.errors import EXIT_NOT_SAVED, UserError
from jaxtpu.paths import flatten
from jaxtpu.processes import agree, primary

_RUN = "run"  # JSON: the run that the checkpoint is of
_LOG = "saved.jsonl"
_DAMAGED, _DELETED, _TEMPORARY = ".damaged", ".deleted", ".orbax-checkpoint-tmp"
_MANIFEST_SECONDS = 600  # what process 0 waits for the others' parts before it drops older ones

# Orbax logs every failure with its whole stack before it raises it; what it raises is told below.
absl.logging.set_verbosity(absl.logging.FATAL)


class SaveError(UserError):
    """A checkpoint could not be written."""

    exit_code = EXIT_NOT_SAVED


class Checkpoints:
    """The checkpoints of one run, in `<workdir>/checkpoints` or `checkpoint.directory`.

    Saving is asynchronous: the caller waits for the copy to the host, not for the disk. In a
    thread, Orbax writes the files under a temporary name and renames them; then every file is
    hashed into the manifest; then those that are not to be kept are deleted. A checkpoint counts
    from its manifest on.

    Args:
      workdir: folder of the run.
      config: where, and what is kept.
      record: what is stored with each checkpoint about the run: its config, as JSON values.
      tell: is given a line about each checkpoint that is damaged.
    """

    def __init__(
        self,
        workdir: str,
        config: CheckpointConfig,
        record: dict[str, Any] | None = None,
        tell: Callable[[str], None] = print,
    ):
        self.directory = directory_of(workdir, config)
        self.tell = tell
        self._retention = Retention(
            config.keep_last, config.keep_every, config.keep_best, config.best_by
        )
        self._record = (record or {}) | {"versions": versions()}
        self._metrics: dict[int, float | None] = {}
        self._writer = self._new_writer()
        self._commit: threading.Thread | None = None
        self._failure: tuple[int, BaseException] | None = None
        self.saved_step: int | None = None

    def _new_writer(self) -> ocp.AsyncCheckpointer:
        handlers = {
            "state": ocp.StandardCheckpointHandler(),
            "data": ocp.JsonCheckpointHandler(),
            _RUN: ocp.JsonCheckpointHandler(filename="run.json"),
        }
        return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))

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
        found = self._find_whole(set_aside) if primary() else (0, "")
        step, problem = agree("newest whole checkpoint", found)
        if problem:
            raise UserError(problem)
        return step or None

    def _find_whole(self, set_aside: bool) -> tuple[int, str]:
        if set_aside:
            self._remove_leftovers()
        for step in reversed(self._all()):
            path = self.directory / str(step)
            found = manifest.faults(path)
            if not found:
                return step, ""
            done = f"; it is now {_set_aside(path).name}" if set_aside else ""
            self.tell(f"WARNING: the checkpoint of step {step} is damaged: {_listed(found)}{done}.")
        if saved := self._saved():
            return 0, (
                f"no checkpoint in {self.directory} is whole, though those of steps "
                f"{', '.join(map(str, saved))} were saved. To begin again from step 0, choose "
                "another --workdir, or delete that folder."
            )
        return 0, ""

    def _saved(self) -> list[int]:
        """The steps that were ever saved to the end and not deleted since: from the log."""
        steps = set()
        with contextlib.suppress(OSError, ValueError):
            for line in (self.directory / _LOG).read_text().splitlines():
                event = json.loads(line)
                (steps.add if event["event"] == "saved" else steps.discard)(event["step"])
        return sorted(steps)

    def _log(self, event: str, step: int) -> None:
        line = json.dumps({"event": event, "step": step, "time": round(time.time(), 3)})
        path = self.directory / _LOG
        before = path.read_text() if path.exists() else ""  # buckets have no append
        partial = self.directory / (_LOG + ".partial")
        partial.write_text(f"{before}{line}\n")
        partial.replace(path)

    def _remove_leftovers(self) -> None:
        """What a killed process was writing or deleting."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if _TEMPORARY in path.name or path.name.endswith(_DELETED):
                path.rmtree()

    def save(self, step: int, state: Any, position: dict, metric: float | None) -> None:
        """Starts to save; waits first for the save before it.

        Args:
          step: steps done.
          state: pytree of arrays.
          position: the data position as JSON values.
          metric: what the checkpoint is ranked by; None where it was not evaluated.

        Raises:
          SaveError: this save, or the one before it, failed.
        """
        self.wait()
        if step in self.steps:
            self.saved_step = step
            return
        run = self._record | {"step": step, "metric": _finite(metric), "time": time.time()}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(position),
            run=ocp.args.JsonSave(run | {"structure": structure_of(state)}),
        )
        try:
            if primary():
                self.directory.mkdir(parents=True, exist_ok=True)
                if (path := self.directory / str(step)).exists():
                    _set_aside(path)
            self._writer.save(self.directory / str(step), items)
        except Exception as error:  # Orbax raises whatever its layers raise
            self._failed(step, error)
        self._metrics[step] = metric
        self._commit = threading.Thread(
            target=self._finish, args=(step,), name="jaxtpu-checkpoint", daemon=True
        )
        self._commit.start()

    def _finish(self, step: int) -> None:
        """In a thread: the end of a save."""
        try:
            self._writer.wait_until_finished()
            path = self.directory / str(step)
            manifest.write_part(path, jax.process_index(), jax.process_count())
            if primary():
                _wait_until(lambda: manifest.is_finished(path), _MANIFEST_SECONDS)
                self._log("saved", step)
                self.prune()
            self.saved_step = step
        except BaseException as error:
            self._failure = step, error

    def prune(self) -> list[int]:
        """Deletes the checkpoints that are not to be kept; returns their steps."""
        dropped = self._retention.dropped({step: self._metric(step) for step in self.steps})
        for step in dropped:
            self.delete(step)
        return dropped

    def delete(self, step: int) -> None:
        """Deletes a checkpoint; a half-deleted one has another name."""
        path = self.directory / str(step)
        gone = path.parent / (path.name + _DELETED)
        path.rename(gone)
        self._log("deleted", step)
        gone.rmtree()

    def _metric(self, step: int) -> float | None:
        if step not in self._metrics:
            self._metrics[step] = self.read_run(step)["metric"]
        return self._metrics[step]

    def read_run(self, step: int) -> dict[str, Any]:
        """What is stored about the run: `config`, `versions`, `structure`, `metric`, `time`."""
        return json.loads((self.directory / str(step) / _RUN / "run.json").read_text())

    def read_position(self, step: int) -> dict[str, Any]:
        """The data position as JSON values."""
        with self._told(step), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            return reader.restore(self.directory / str(step) / "data")

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._commit is not None and self._commit.is_alive()

    def idle_within(self, seconds: float) -> bool:
        """Whether the save that is under way, if one is, ends within so many seconds."""
        if self._commit is not None:
            self._commit.join(seconds)
        return not self.saving

    def raise_failure(self) -> None:
        """Tells once of a save that has failed since.

        Raises:
          SaveError: it has.
        """
        if self._failure is not None and not self.saving:
            step, error = self._failure
            self._failure = None
            self._failed(step, error)

    def _failed(self, step: int, error: BaseException) -> None:
        self._writer = self._new_writer()  # of the old one it is not known what it still does
        if primary():
            with contextlib.suppress(OSError):
                self._remove_leftovers()
        with contextlib.suppress(OSError):
            left = self.kept
        raise SaveError(
            f"could not save the checkpoint of step {step} in {self.directory}: {_reason(error)}. "
            + (f"Whole are those of steps {left}." if left else "There is no other.")
        ) from error

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """(state, position) of a step (default the newest whole one), laid out as `abstract_state`
        says, whatever mesh it was saved from, and in its dtypes.

        Raises:
          MismatchError: it is of another model or optimizer.
          UserError: it cannot be read.
        """
        step = self.newest_whole() if step is None else step
        where = f"the checkpoint of step {step} in {self.directory}"
        check_structure(self._structure(step), structure_of(abstract_state), where)
        return self._read(step, abstract_state), self.read_position(step)

    def restore_params(self, abstract_params: Any, step: int | None = None) -> Any:
        """The parameters alone, without the optimizer state, in the dtypes of `abstract_params`."""
        step = self.newest_whole(set_aside=False) if step is None else step
        where = f"the checkpoint of step {step} in {self.directory}"
        check_structure(self.params_structure(step), structure_of(abstract_params), where)
        return self._read(step, {"params": abstract_params})["params"]

    def restore_some(self, abstract: dict[str, Any], step: int) -> dict[str, Any]:
        """Some parameters, by path."""
        nested: dict[str, Any] = {}
        for path, leaf in abstract.items():
            *folders, name = path.split("/")
            inner = nested
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = leaf
        return flatten(self._read(step, {"params": nested})["params"])

    def params_structure(self, step: int) -> Structure:
        """Shapes and dtypes of the parameters, by path."""
        found = self._structure(step).items()
        return {n.removeprefix("params/"): v for n, v in found if n.startswith("params/")}

    def _structure(self, step: int) -> Structure:
        return {name: tuple(leaf) for name, leaf in self.read_run(step)["structure"].items()}

    def _read(self, step: int, abstract: Any) -> Any:
        """Arrays of the state: those that `abstract` has."""
        arguments = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            abstract,
        )
        path = self.directory / str(step) / "state"
        with self._told(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(
                path,
                ocp.args.PyTreeRestore(abstract, restore_args=arguments, partial_restore=True),
            )

    @contextlib.contextmanager
    def _told(self, step: int):
        """What Orbax raises for a file it cannot read, as a message with what is left.

        Orbax raises whatever its layers raise, so every exception is taken, and kept as the cause.
        """
        try:
            yield
        except Exception as error:
            others = ", ".join(str(other) for other in self.steps if other != step)
            left = f"there are those of steps {others}" if others else "none is left"
            raise UserError(
                f"could not restore the checkpoint of step {step} in {self.directory}: "
                f"{_reason(error)}\nOf other checkpoints, {left}."
            ) from error

    def wait(self) -> None:
        """Returns when every save that was started is whole on disk.

        Raises:
          SaveError: one failed.
        """
        if self._commit is not None:
            self._commit.join()
            self._commit = None
        self.raise_failure()

    def close(self) -> None:
        """Ends the threads; call it after a failure too."""
        if not self.saving:
            with contextlib.suppress(Exception):  # `wait` has told what failed
                self._writer.close()


def directory_of(workdir: str, config: CheckpointConfig) -> epath.Path:
    """Where the checkpoints of a run are; a bucket's `gs://...` as well."""
    chosen = config.directory or str(epath.Path(workdir).expanduser() / "checkpoints")
    path = epath.Path(chosen)
    return path if "://" in chosen else epath.Path(path.expanduser().absolute())


def versions() -> dict[str, str]:
    """Of what the numbers of a run depend on."""
    libraries = {"jax": jax, "flax": flax, "optax": optax, "numpy": np, "orbax-checkpoint": ocp}
    found = {name: library.__version__ for name, library in libraries.items()}
    return found | {"python": platform.python_version()}


def _set_aside(path: epath.Path) -> epath.Path:
    names = (f"{path.name}{_DAMAGED}{n or ''}" for n in range(1000))
    new = next(aside for name in names if not (aside := path.parent / name).exists())
    path.rename(new)
    return new


def _listed(found: list[str]) -> str:
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


def _finite(metric: float | None) -> float | None:
    return None if metric is None or metric != metric else metric


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"not all processes wrote their part of the manifest in {seconds} s")
        time.sleep(0.2)
