"""Checkpoints: the state, the step and the data position as one unit, written by Orbax."""

import contextlib
import math
import pathlib
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxtpu.config import CheckpointConfig
from jaxtpu.errors import UserError

BEST_METRIC = "validation_loss"

# Orbax logs every failure with its whole stack before it raises it; what it raises is told below.
absl.logging.set_verbosity(absl.logging.FATAL)


def _rank(metrics: dict) -> float:
    """What the best are sorted by; NaN would leave them in any order."""
    loss = metrics[BEST_METRIC]
    return loss if math.isfinite(loss) else math.inf


class Checkpoints:
    """The checkpoints of one run, in `<workdir>/checkpoints`.

    Saving is asynchronous: the caller waits for the copy to the host, not for the disk. An
    unfinished checkpoint has a temporary name and is never taken for a whole one.
    """

    def __init__(self, workdir: str, config: CheckpointConfig):
        self.directory = pathlib.Path(workdir).expanduser().absolute() / "checkpoints"
        keep: list[Any] = [checkpoint_managers.LatestN(config.keep_last)]
        if config.keep_best:
            keep.append(
                checkpoint_managers.BestN(
                    get_metric_fn=_rank,
                    reverse=True,
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
                cleanup_tmp_directories=True,
            ),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
            },
        )

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    @property
    def kept(self) -> str:
        """The steps that are kept, as a list to read."""
        return ", ".join(str(step) for step in sorted(self._manager.all_steps()))

    def save(self, step: int, state: Any, position: dict, validation_loss: float | None) -> None:
        """Starts to save; waits first for the save before it, and raises if that one failed.

        Args:
          step: steps done.
          state: pytree of arrays.
          position: the data position as JSON values.
          validation_loss: what the checkpoint is ranked by; None where it was not evaluated.
        """
        if step in self._manager.all_steps():
            return
        metrics = None if validation_loss is None else {BEST_METRIC: validation_loss}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(position)
        )
        with self._told("save", step):
            self._manager.save(step, args=items, metrics=metrics)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """(state, position) of a step (default the latest), laid out as `abstract_state` says,
        whatever mesh it was saved from."""
        step = self.latest_step if step is None else step
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
        )
        with self._told("restore", step):
            restored = self._manager.restore(step, args=items)
        return restored.state, restored.data

    def restore_params(self, abstract_params: Any, step: int | None = None) -> Any:
        """The parameters alone, without the optimizer state."""
        step = self.latest_step if step is None else step
        abstract = {"params": abstract_params}
        arguments = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), abstract
        )
        path = self.directory / str(step) / "state"
        with self._told("restore", step), ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(
                path,
                ocp.args.PyTreeRestore(abstract, restore_args=arguments, partial_restore=True),
            )
        return restored["params"]

    def wait(self) -> None:
        """Returns when every save that was started is whole on disk; raises if one failed."""
        with self._told("save"):
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _told(self, action: str, step: int | None = None):
        """What Orbax raises for a full disk or a damaged file, as a message with what is left.

        Orbax raises whatever its layers raise, so every exception is taken, and kept as the cause.
        """
        try:
            yield
        except Exception as error:
            which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            others = [s for s in self._manager.all_steps() if s != step]
            left = (
                f"there are those of steps {', '.join(map(str, others))}"
                if others
                else "none is left"
            )
            hint = f" To go on from an earlier one, delete {self.directory / str(step)}."
            raise UserError(
                f"could not {action} {which} in {self.directory}: {reason}\nOf other checkpoints, "
                f"{left}.{hint if action == 'restore' and others else ''}"
            ) from error

    def close(self) -> None:
        """Ends the threads; call it after a failure too."""
        with self._told("save"):
            self._manager.close()
