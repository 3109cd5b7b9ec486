"""The checkpoints of one run: the state, the step, the data position and the run as one unit."""

import contextlib
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxtpu.checkpoint import manifest
from jaxtpu.checkpoint.folder import RUN, directory_of, rename_aside
from jaxtpu.checkpoint.policy import Retention
from jaxtpu.checkpoint.read import SavedRun, reason
from jaxtpu.checkpoint.structure import structure_of
from jaxtpu.config import CheckpointConfig
from jaxtpu.errors import EXIT_NOT_SAVED, UserError
from jaxtpu.processes import primary

_MANIFEST_SECONDS = 600  # what process 0 waits for the others' parts before it drops older ones


class SaveError(UserError):
    """A checkpoint could not be written."""

    exit_code = EXIT_NOT_SAVED


class Checkpoints(SavedRun):
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
        super().__init__(directory_of(workdir, config), tell)
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
            RUN: ocp.JsonCheckpointHandler(filename="run.json"),
        }
        return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))

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
                    rename_aside(path)
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
                self.log("saved", step)
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

    def _metric(self, step: int) -> float | None:
        if step not in self._metrics:
            self._metrics[step] = self.read_run(step)["metric"]
        return self._metrics[step]

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
                self.remove_leftovers()
        with contextlib.suppress(OSError):
            left = self.kept
        raise SaveError(
            f"could not save the checkpoint of step {step} in {self.directory}: {reason(error)}. "
            + (f"Whole are those of steps {left}." if left else "There is no other.")
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


def versions() -> dict[str, str]:
    """Of what the numbers of a run depend on."""
    libraries = {"jax": jax, "flax": flax, "optax": optax, "numpy": np, "orbax-checkpoint": ocp}
    found = {name: library.__version__ for name, library in libraries.items()}
    return found | {"python": platform.python_version()}


def _finite(metric: float | None) -> float | None:
    return None if metric is None or metric != metric else metric


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"not all processes wrote their part of the manifest in {seconds} s")
        time.sleep(0.2)
