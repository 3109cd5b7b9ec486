"""The loop: next batch, step, hooks. Nothing in it waits for a step that was just dispatched."""

import collections
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtpu.processes import Agreement
from jaxtpu.train.step import TrainState


class Clock:
    """When each step was known to be finished, and how long the run was stopped for other work.

    Step times are differences between finished steps, so they are the devices' and not the
    dispatch's; evaluation and saving are taken out.
    """

    def __init__(self) -> None:
        self.completed_step = 0
        self._finished: dict[int, float] = {}
        self._paused = 0.0

    def finish(self, step: int) -> None:
        self.completed_step = step
        self._finished[step] = time.perf_counter() - self._paused

    @contextlib.contextmanager
    def pause(self):
        """Time within this context does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    def seconds(self, first: int, last: int) -> float | None:
        """Seconds from the end of step `first` to the end of step `last`; None if `first` was not
        timed (it was before this process started)."""
        if first not in self._finished or last not in self._finished:
            return None
        seconds = self._finished[last] - self._finished[first]
        for step in [s for s in self._finished if s < first]:
            del self._finished[step]
        return seconds


@dataclasses.dataclass
class Progress:
    """What a hook is given after a step was dispatched.

    Attributes:
      step: steps dispatched.
      last: whether this is the final step of the run.
      stopping: whether the run was asked to stop and ends after this step.
      state: state after `step` (being computed: touching its values waits for it).
      metrics: metrics of `step` (likewise).
      position: data position after the batch of `step`.
      clock: times of finished steps.
      drain: waits until every dispatched step is finished.
      agreed: what all processes agreed to do after this step.
    """

    step: int
    last: bool
    stopping: bool
    state: TrainState
    metrics: dict[str, jax.Array]
    position: Any
    clock: Clock
    drain: Callable[[], None]
    agreed: frozenset[str] = frozenset()


Hook = Callable[[Progress], None]


class NonFinite(Exception):
    """The loop does not go on: too many updates in a row were dropped, for what was not finite.

    Attributes:
      step: the step that was not made.
      metrics: of it, on the host.
      batch: of it.
      before, after: data positions around the batch.
      state: the state before it.
    """

    def __init__(self, step: int, metrics: Any, batch: Any, before: Any, after: Any, state: Any):
        super().__init__(step)
        self.step, self.metrics, self.state = step, metrics, state
        self.batch, self.before, self.after = batch, before, after


def every(interval: int, hook: Hook, *, when_stopping: bool = False) -> Hook:
    """`hook` at multiples of `interval` steps (0: never) and after the last step of the run; with
    `when_stopping` also when the process is asked to stop."""

    def at_interval(progress: Progress) -> None:
        due = progress.last or (interval and progress.step % interval == 0)
        if progress.stopping and not progress.last:
            due = when_stopping
        if due:
            hook(progress)

    return at_interval


class StopRequest:
    """SIGTERM or Ctrl-C as a wish that the loop grants after the current step; where there are
    several processes, after a step that all agree on, whichever of them was told.

    A second signal is not caught: it ends the process at once.
    """

    def __init__(self, agreement: Agreement | None = None) -> None:
        self.signal: signal.Signals | None = None
        self.agreement = Agreement(0) if agreement is None else agreement
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def due(self, step: int) -> frozenset[str]:
        """What all processes do after this step; with `stop` in it, `signal` says why."""
        agreed = self.agreement.due(step)
        for what in agreed:
            if what.startswith("stop:"):
                self.signal = signal.Signals(int(what.removeprefix("stop:")))
                return agreed | {"stop"}
        return agreed

    def _receive(self, number: int, _frame) -> None:
        self.signal = signal.Signals(number)
        self.agreement.want(f"stop:{int(number)}")
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __exit__(self, *_exception) -> None:
        self._restore()


def train_loop(
    train_step: Callable,
    state: TrainState,
    batches: Iterator[tuple[dict[str, jax.Array], Any]],
    *,
    start: int,
    steps: int,
    max_in_flight: int,
    hooks: list[Hook],
    stop: StopRequest,
    clock: Clock,
    position: Any = None,
    tolerated: int | None = None,
) -> tuple[TrainState, int]:
    """Runs steps `start + 1` to `steps`, or until `stop`, or until there is no batch left.

    Args:
      train_step: (state, batch) -> (state, metrics).
      state: donated.
      batches: device batches, each with the data position after it.
      start: steps done before.
      steps: steps of the whole run.
      max_in_flight: steps dispatched ahead of the last one known to be finished. The bound keeps
        batches from piling up on the devices, and emulated devices from starving.
      hooks: called after each dispatch, in order.
      stop: looked at after every step, by all processes.
      clock: is told when a step is finished.
      position: the data position before the first batch.
      tolerated: updates dropped in a row at which the loop ends; None where none is dropped.

    Returns:
      The final state and the number of steps done.

    Raises:
      NonFinite: that many were dropped. It is known once the step is finished, in all processes
        at the same step; the steps dispatched meanwhile have left the state as it was.
    """
    in_flight: collections.deque = collections.deque()

    def finish_oldest() -> None:
        step, metrics, *read = in_flight.popleft()
        jax.block_until_ready(metrics)
        if tolerated is not None and float(metrics["dropped"]) >= tolerated:
            raise NonFinite(step, jax.device_get(metrics), *read, state)
        clock.finish(step)

    def drain() -> None:
        while in_flight:
            finish_oldest()

    step = start
    while step < steps:
        ready = next(batches, None)
        if ready is None:  # the data ended
            break
        before, (batch, position) = position, ready
        state, metrics = train_step(state, batch)
        step += 1
        in_flight.append((step, metrics, batch, before, position))
        if len(in_flight) > max_in_flight:
            finish_oldest()
        agreed = stop.due(step)
        last, stopping = step == steps, "stop" in agreed
        if last or stopping:
            drain()
        progress = Progress(step, last, stopping, state, metrics, position, clock, drain, agreed)
        for hook in hooks:
            hook(progress)
        if stopping:
            break
    drain()
    return state, step
