"""A run under way: the hooks of one process's part of it, and what they share."""

import itertools
import time
from typing import Any

from rich.console import Console

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.checkpoint.hook import SaveHook
from jaxtpu.closing import tokens_per_byte
from jaxtpu.config import to_steps
from jaxtpu.data.order import Position
from jaxtpu.data.prefetch import Batches
from jaxtpu.mesh import peak_memory_bytes
from jaxtpu.observe import console as screen
from jaxtpu.observe.log import LogHook, Rates
from jaxtpu.observe.profile import ProfileHook
from jaxtpu.observe.tables import peak_flops
from jaxtpu.observe.watchdog import Watchdog
from jaxtpu.observe.writer import MetricWriter
from jaxtpu.plan.oom import naming
from jaxtpu.processes import primary
from jaxtpu.setup import Setup, train_loader, validation_batches
from jaxtpu.train.evaluate import evaluate
from jaxtpu.train.guard import tolerated
from jaxtpu.train.loop import Clock, Progress, StopRequest, every, train_loop
from jaxtpu.train.task import count_name


class Run:
    """The hooks of one process's part of a run, and what they share."""

    def __init__(
        self,
        setup: Setup,
        checkpoints: Checkpoints,
        start: int,
        out: Console,
        watchdog: Watchdog,
        stop: StopRequest,
    ):
        self.setup, self.checkpoints, self.start = setup, checkpoints, start
        self.watchdog, self.stop, self.agreement = watchdog, stop, stop.agreement
        self.config = setup.config
        self.writer = MetricWriter(self.config.workdir, start, primary())
        self.display = screen.StepDisplay(out, start, setup.units.steps)
        self.log: LogHook | None = None
        self.latest: dict[str, float] = {}
        self.position: Position | None = None
        self.ranked: dict[int, float | None] = {}

    def train(self, train_step: Any, state: Any, position: Position):
        """(state, steps done, the signal that stopped it or None).

        Raises:
          NonFinite: too many updates in a row were dropped.
        """
        config = self.config
        loader = train_loader(self.setup, position)
        try:
            with loader, self.watchdog.phase("step"):
                state, step = train_loop(
                    train_step,
                    state,
                    loader,
                    start=self.start,
                    steps=self.setup.units.steps,
                    max_in_flight=config.train.max_steps_in_flight,
                    hooks=self._hooks(loader),
                    stop=self.stop,
                    clock=Clock(),
                    position=position,
                    tolerated=tolerated(config.guard),
                )
        finally:
            self.display.close()
            self.writer.close()
        return state, step, self.stop.signal if step < self.setup.units.steps else None

    def _hooks(self, loader: Batches) -> list:
        train, steps = self.config.train, self._steps
        per_byte = tokens_per_byte(self.setup.stream)
        flops = self.setup.programs.model.flops_per_token
        rates = Rates(per_byte, flops, peak_flops(self.setup.programs.mesh))
        self.log = LogHook(
            steps("train.log_every", train.log_every),
            self.start,
            rates,
            lambda: loader.wait_seconds,
            self._log,
        )
        hooks = [lambda progress: self._advance(progress, loader), self.log]
        if self.setup.validation is not None:
            interval = steps("train.evaluate_every", train.evaluate_every)
            hooks.append(every(interval, self._evaluate))
        interval = steps("checkpoint.every", self.config.checkpoint.every)
        minutes = self.config.checkpoint.every_minutes
        note, save = self.display.note, self._save
        hooks.append(SaveHook(self.checkpoints, interval, minutes, save, note, self.agreement))
        if profile_at := steps("train.profile_at", train.profile_at):
            hooks.append(ProfileHook(str(self.writer.tensorboard), profile_at, train.profile_steps))
        return hooks

    def _advance(self, progress: Progress, loader: Batches) -> None:
        self.watchdog.beat(progress.step, loader.wait_seconds)
        self.display.advance(progress.step)
        self.position = progress.position

    def _steps(self, field: str, value: Any) -> int:
        return to_steps(field, value, self.setup.units)

    def _log(self, step: int, values: dict[str, float]) -> None:
        peak = peak_memory_bytes(self.setup.programs.mesh.local_devices)
        if peak is not None:  # emulated devices do not count theirs
            values["memory/peak_gib"] = peak / 2**30
        self.latest |= values
        self.writer.scalars(step, values)
        self.display.show(step, values)
        for line in self.watchdog.stragglers():
            self.display.note(line)

    def _evaluate(self, progress: Progress) -> None:
        progress.drain()
        self.log.flush(progress)
        with progress.clock.pause(), self.watchdog.phase("evaluate"), naming("evaluation"):
            started = time.perf_counter()
            batches = validation_batches(self.setup)
            alone = self.agreement.alone  # others would go on without this process
            stopped = lambda: alone and bool(self.stop) and not progress.last  # noqa: E731
            means = evaluate(
                self.setup.programs.eval_step,
                progress.state.evaluated(),
                itertools.takewhile(lambda _: not stopped(), batches),
                self.config.train.max_steps_in_flight,
            )
            if stopped():
                return  # a part of the split is no evaluation, and there is a state to save
            values = {f"validation/{name}": value for name, value in means.items()}
            self.latest |= values
            self.ranked[progress.step] = means.get(self.config.checkpoint.best_by)
            self.writer.scalars(progress.step, values)
            seconds = time.perf_counter() - started
            unit = count_name(means)
            accuracy = f", accuracy {means['accuracy']:.4f}" if "accuracy" in means else ""
            self.display.note(
                f"step {progress.step}: validation loss {means['loss']:.4f} over "
                f"{means[unit]:,.0f} {unit}{accuracy} ({seconds:.1f} s)"
            )

    def _save(self, progress: Progress) -> None:
        progress.drain()
        self.log.flush(progress)
        saving = naming("saving the checkpoint")
        with progress.clock.pause(), self.watchdog.phase("save"), saving:
            self.checkpoints.save(
                progress.step,
                progress.state,
                progress.position.to_json(),
                self.ranked.get(progress.step),
            )
