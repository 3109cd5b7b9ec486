"""Training to the end through numbers that go wrong: back to a checkpoint, or a stop with a dump."""

import json
from typing import Any

import jax
from rich.console import Console

from jaxtpu.begin import new_state, restored_state
from jaxtpu.checkpoint import Checkpoints
from jaxtpu.checkpoint.store import SaveError
from jaxtpu.data.order import Position
from jaxtpu.debug import stopped, what_went_wrong
from jaxtpu.observe import console as screen
from jaxtpu.observe.tables import Rows
from jaxtpu.observe.watchdog import Watchdog
from jaxtpu.plan.oom import naming
from jaxtpu.processes import Agreement
from jaxtpu.running import Run
from jaxtpu.setup import Setup
from jaxtpu.train.loop import NonFinite, StopRequest


def first_state(
    setup: Setup, checkpoints: Checkpoints, saved: int | None, out: Console, watchdog: Watchdog
) -> tuple[Any, Position]:
    """(state, data position): restored where there is a checkpoint, otherwise new."""
    if saved is None:
        initialising = screen.busy(out, "initialised")
        with initialising, watchdog.phase("compile"), naming("initialisation"):
            return new_state(setup), Position(0, setup.config.seed)
    restoring = screen.busy(out, f"restored step {saved}")
    with restoring, watchdog.phase("restore"), naming("restoring the checkpoint"):
        return restored_state(setup, checkpoints, saved)


def train_on(
    setup: Setup,
    checkpoints: Checkpoints,
    train_step: Any,
    begin: tuple[Any, Position, int],
    out: Console,
    watchdog: Watchdog,
    rows: Rows,
) -> tuple[Run, Any, int, Any]:
    """Trains to the end, with `guard.nonfinite=rollback` from the last checkpoint again where it
    has to be: past the batches that were read since.

    Args:
      train_step: compiled.
      begin: state, data position and steps done.
      rows: about the run, for TensorBoard.

    Returns:
      The last `Run`, and what its `train` gave.

    Raises:
      UserError: numbers went wrong, and the run is not to go on, or did so too often.
    """
    state, position, start = begin
    config, rollbacks = setup.config, 0
    with StopRequest(Agreement(config.train.max_steps_in_flight + 2)) as stop:
        while True:
            run = Run(setup, checkpoints, start, out, watchdog, stop)
            run.writer.text("startup", "\n".join(f"{name}: {value}" for name, value in rows))
            run.writer.text("config", json.dumps(config.to_dict(), indent=2))
            try:
                return run, *run.train(train_step, state, position)
            except NonFinite as error:
                before, position = start, error.after
                _finish_saves(checkpoints, out, watchdog)
                if config.guard.nonfinite != "rollback" or rollbacks == config.guard.limit:
                    raise stopped(setup, checkpoints, error, watchdog) from None
                _free(error.state)
                start, state = _back(setup, checkpoints, out, watchdog)
                rollbacks = rollbacks + 1 if start == before else 1
                out.print(
                    f"WARNING: {what_went_wrong(error)}: back to step {start}, and past the batches "
                    f"since then (the run ends after {config.guard.limit} times from one step; "
                    f"this is {rollbacks}).",
                    markup=False,
                )


def _free(state: Any) -> None:
    """There is no room for two states."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


def _finish_saves(checkpoints: Checkpoints, out: Console, watchdog: Watchdog) -> None:
    with watchdog.phase("save"):
        try:
            checkpoints.wait()
        except SaveError as error:
            out.print(f"WARNING: {error}", markup=False)


def _back(
    setup: Setup, checkpoints: Checkpoints, out: Console, watchdog: Watchdog
) -> tuple[int, Any]:
    """(steps done, state) of the newest whole checkpoint, or of the start."""
    with watchdog.phase("restore"):
        saved = checkpoints.newest_whole()
    state, _ = first_state(setup, checkpoints, saved, out, watchdog)
    return saved or 0, state
