"""What the loop costs: steps inside `train_loop` beside the bare compiled step, back to back."""

import collections
import os
import statistics
import tempfile
from typing import Any

import jax
from rich.console import Console

from jaxtpu.data.loader import TrainLoader
from jaxtpu.data.order import Position
from jaxtpu.observe.console import StepDisplay
from jaxtpu.observe.log import LogHook, Rates
from jaxtpu.observe.writer import MetricWriter
from jaxtpu.setup import Setup
from jaxtpu.train.loop import Clock, StopRequest, every, train_loop
from tests.benchmarks.step import first_batches, quickstart
from tests.benchmarks.timing import interleave, measure, report, spread

BAR = 1.03
SECONDS = 110
STEPS = 10  # one log interval of the quickstart


class InLoop:
    """Segments of a run as the trainer makes it, with the progress bar of a terminal.

    A segment ends with every step finished. While the last ones run, the loader fills up again:
    it does no work during the segments of something else.

    Args:
      train_step: what the loop runs.
      workdir: of the metrics.
      console: of the progress bar.
    """

    def __init__(self, setup: Setup, train_step: Any, workdir: str, console: Console):
        config, stream = setup.config, setup.stream
        self.setup, self.train_step, self.console = setup, train_step, console
        self.loader = TrainLoader(
            stream,
            batch_size=config.data.batch_size,
            sequence_length=config.data.sequence_length,
            seed=config.seed,
            start=Position(0, config.seed),
            sharding=setup.programs.batch_sharding,
            prefetch=config.data.prefetch,
        )
        self.state, self.step, self.clock = setup.programs.init(), 0, Clock()
        self.writer = MetricWriter(workdir, 0)
        per_byte = stream.num_tokens / stream.num_bytes
        rates = Rates(per_byte, setup.programs.model.flops_per_token, None)
        log_every = int(config.train.log_every)
        self.log = LogHook(log_every, 0, rates, lambda: self.loader.wait_seconds, self._emit)

    def _emit(self, step: int, values: dict[str, float]) -> None:
        self.writer.scalars(step, values)
        self.display.show(step, values)

    def __call__(self) -> None:
        self.display = StepDisplay(self.console, self.step, self.setup.units.steps)
        hooks = [
            lambda progress: self.display.advance(progress.step),
            self.log,
            every(0, lambda progress: None),  # in the place of evaluating
            every(0, lambda progress: None, when_stopping=True),  # in the place of saving
        ]
        with StopRequest() as stop:
            self.state, self.step = train_loop(
                self.train_step,
                self.state,
                self.loader,
                start=self.step,
                steps=self.step + STEPS,
                max_in_flight=self.setup.config.train.max_steps_in_flight,
                hooks=hooks,
                stop=stop,
                clock=self.clock,
            )
        self.display.close()

    def close(self) -> None:
        self.loader.close()
        self.writer.close()


class Bare:
    """Segments of the compiled step alone: one batch, and as many steps in flight as the loop."""

    def __init__(self, setup: Setup, train_step: Any):
        self.train_step, self.state = train_step, setup.programs.init()
        self.batch = first_batches(setup, 1)[0]
        self.max_in_flight = setup.config.train.max_steps_in_flight

    def __call__(self) -> None:
        in_flight: collections.deque = collections.deque()
        for _ in range(STEPS):
            self.state, self.metrics = self.train_step(self.state, self.batch)
            in_flight.append(self.metrics)
            if len(in_flight) > self.max_in_flight:
                jax.block_until_ready(in_flight.popleft())
        jax.block_until_ready(list(in_flight))


def main() -> int:
    setup = quickstart()
    programs = setup.programs
    compiled = programs.train_step.lower(programs.abstract_state, programs.abstract_batch).compile()
    bare = Bare(setup, compiled)
    with tempfile.TemporaryDirectory() as workdir, open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=80)
        in_loop = InLoop(setup, compiled, workdir, console)
        costs = interleave(in_loop, bare, SECONDS)
        in_loop.close()
        # The loop's own work alone: its step does nothing, and gives back what is finished.
        empty = InLoop(setup, lambda state, batch: (state, bare.metrics), workdir, console)
        empty()
        work = [measure(empty).cpu for _ in costs]
        empty.close()
    met = report("in the loop", "bare", costs, bar=BAR, steps=STEPS)
    shares = [seconds / statistics.median(cost.cpu for _, cost in costs) for seconds in work]
    print(f"the loop around a step that does nothing, CPU time / bare: {spread(shares)}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
