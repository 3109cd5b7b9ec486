"""A run, from a configuration to its results: set up, resume, train, sum up."""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Set
from typing import Any

import jax
from rich.console import Console

from jaxtpu.begin import new_state, restored_state
from jaxtpu.checkpoint import Checkpoints
from jaxtpu.checkpoint.hook import SaveHook
from jaxtpu.closing import closing_table, longer_command, tokens_per_byte, write_sample
from jaxtpu.config import Config, to_steps
from jaxtpu.data.image_loader import ImageLoader
from jaxtpu.data.loader import TrainLoader
from jaxtpu.data.order import Position
from jaxtpu.errors import EXIT_OK, UserError
from jaxtpu.mesh import peak_memory_bytes
from jaxtpu.observe import console as screen
from jaxtpu.observe.log import LogHook, Rates
from jaxtpu.observe.memory import peak_memory
from jaxtpu.observe.profile import ProfileHook
from jaxtpu.observe.tables import peak_flops, startup_rows
from jaxtpu.observe.watchdog import Watchdog
from jaxtpu.observe.writer import MetricWriter
from jaxtpu.plan.oom import OutOfMemoryError, explain_run, naming
from jaxtpu.processes import Agreement, check_same, primary
from jaxtpu.setup import (
    Setup,
    check_workdir,
    fingerprint,
    locked,
    set_up,
    train_loader,
    use_compile_cache,
    validation_batches,
    write_config,
)
from jaxtpu.train.evaluate import evaluate
from jaxtpu.train.loop import Clock, Progress, StopRequest, every, train_loop
from jaxtpu.train.task import count_name


def train(
    config: Config, command: str, given: Set[str] = frozenset(), base: Config | None = None
) -> int:
    """Trains, or resumes, the run in `config.workdir`.

    Args:
      config: as loaded.
      command: the command line that started this, for the advice on how to resume.
      given: dotted names of the fields that it sets, which `mesh=auto` leaves alone.
      base: what the config file says by itself, where the command line changes the model.

    Returns:
      Exit code: 0, or 128 + the signal that stopped the run after its state was saved.
    """
    if config.compile_cache:
        use_compile_cache(config.compile_cache)
    check_same(fingerprint(config), config.watchdog.start)
    setup = set_up(config, given)
    out = screen.make_console(primary())
    with contextlib.ExitStack() as stack:
        if primary():
            check_workdir(setup.config)
            stack.enter_context(locked(config.workdir))
        watchdog = stack.enter_context(Watchdog(setup.config.watchdog))
        try:
            return _train(setup, out, command, watchdog, base)
        except OutOfMemoryError:
            if setup.tokenizer is None:  # plans are made for models of text
                raise
            try:
                explain_run(
                    out, setup.config, setup.units, setup.tokenizer.vocab_size, jax.devices()
                )
            except UserError as error:  # the run's own error is the one to end with
                out.print(f"It could not be explained: {error}", markup=False)
            raise


def _train(
    setup: Setup, out: Console, command: str, watchdog: Watchdog, base: Config | None
) -> int:
    config = setup.config
    tell = lambda text: out.print(text, markup=False)  # noqa: E731
    record = {"config": config.to_dict(), "seed": config.seed}
    checkpoints = Checkpoints(config.workdir, config.checkpoint, record, tell)
    with watchdog.phase("restore"):
        saved = checkpoints.newest_whole()
    start = saved or 0
    rows = startup_rows(config, setup.programs, setup.units, setup.stream, start, base)
    screen.table(out, "jaxtpu", rows)
    if start >= setup.units.steps:
        _say_finished(out, config, start, command)
        checkpoints.close()
        return EXIT_OK
    state, position = _first_state(setup, checkpoints, saved, out, watchdog)
    write_config(config)
    compiling = screen.busy(out, "compiled the train step")
    with compiling, watchdog.phase("compile"), naming("the train step"):
        train_step = setup.programs.train_step.lower(
            setup.programs.abstract_state, setup.programs.abstract_batch
        ).compile()
    run = _Run(setup, checkpoints, start, out, watchdog)
    run.writer.text("startup", "\n".join(f"{name}: {value}" for name, value in rows))
    run.writer.text("config", json.dumps(config.to_dict(), indent=2))
    with naming("training"):
        state, step, stopped_by = run.train(train_step, state, position)
    longer = longer_command(command, config, setup.units.steps)
    if stopped_by is not None:
        out.print(f"Stopped by {stopped_by.name} after step {step}; everything is saved.")
        screen.commands(out, [("To resume", command)])
        return 128 + stopped_by
    places = [
        ("checkpoints", f"{checkpoints.directory} (steps {checkpoints.kept})"),
        ("TensorBoard", f"tensorboard --logdir={run.writer.tensorboard}"),
        ("metrics", str(run.writer.path)),
    ]
    used = peak_memory(train_step, list(setup.programs.mesh.local_devices))
    closing_table(out, setup, run.position, run.latest, used, places, longer)
    if setup.tokenizer is not None:
        write_sample(out, setup, state.params)
    return EXIT_OK


def _first_state(
    setup: Setup, checkpoints: Checkpoints, saved: int | None, out: Console, watchdog: Watchdog
):
    """(state, data position): restored where there is a checkpoint, otherwise new."""
    if saved is None:
        initialising = screen.busy(out, "initialised")
        with initialising, watchdog.phase("compile"), naming("initialisation"):
            return new_state(setup), Position(0, setup.config.seed)
    restoring = screen.busy(out, f"restored step {saved}")
    with restoring, watchdog.phase("restore"), naming("restoring the checkpoint"):
        return restored_state(setup, checkpoints, saved)


def _say_finished(out: Console, config: Config, steps: int, command: str) -> None:
    out.print(f"\nThis run is finished: {steps} steps are done.")
    screen.commands(out, [("To train longer", longer_command(command, config, steps))])


class _Run:
    """The hooks of one process's part of a run, and what they share."""

    def __init__(
        self,
        setup: Setup,
        checkpoints: Checkpoints,
        start: int,
        out: Console,
        watchdog: Watchdog,
    ):
        self.setup, self.checkpoints, self.start, self.out = setup, checkpoints, start, out
        self.watchdog = watchdog
        self.agreement = Agreement(setup.config.train.max_steps_in_flight + 2)
        self.config = setup.config
        self.writer = MetricWriter(self.config.workdir, start, primary())
        self.display = screen.StepDisplay(out, start, setup.units.steps)
        self.log: LogHook | None = None
        self.stop: StopRequest | None = None
        self.latest: dict[str, float] = {}
        self.position: Position | None = None
        self.ranked: dict[int, float | None] = {}

    def train(self, train_step: Any, state: Any, position: Position):
        """(state, steps done, the signal that stopped it or None)."""
        config = self.config
        loader = train_loader(self.setup, position)
        try:
            with loader, self.watchdog.phase("step"), StopRequest(self.agreement) as stop:
                self.stop = stop
                state, step = train_loop(
                    train_step,
                    state,
                    loader,
                    start=self.start,
                    steps=self.setup.units.steps,
                    max_in_flight=config.train.max_steps_in_flight,
                    hooks=self._hooks(loader),
                    stop=stop,
                    clock=Clock(),
                )
        finally:
            self.display.close()
            self.checkpoints.close()
            self.writer.close()
        return state, step, stop.signal if step < self.setup.units.steps else None

    def _hooks(self, loader: TrainLoader | ImageLoader) -> list:
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

    def _advance(self, progress: Progress, loader: TrainLoader | ImageLoader) -> None:
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
        names = ("loss", "grad_norm")
        self._check_finite(step, {name: values[f"train/{name}"] for name in names})

    def _check_finite(self, step: int, metrics: dict[str, Any]) -> None:
        """Stops the run where training has broken down, before that is saved over good states."""
        for name in ("loss", "grad_norm"):
            if math.isfinite(float(metrics[name])):
                continue
            raise UserError(
                f"the {name} is {float(metrics[name])} at step {step} or in the few before, so the "
                f"run has stopped. Try a lower optimizer.learning_rate (now "
                f"{self.config.optimizer.learning_rate:g}), a longer optimizer.warmup, or "
                f"optimizer.clip_norm=1; checkpoints in {self.checkpoints.directory}: "
                f"{self.checkpoints.kept or 'none'}."
            )

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
        self._check_finite(progress.step, jax.device_get(progress.metrics))
        saving = naming("saving the checkpoint")
        with progress.clock.pause(), self.watchdog.phase("save"), saving:
            self.checkpoints.save(
                progress.step,
                progress.state,
                progress.position.to_json(),
                self.ranked.get(progress.step),
            )
