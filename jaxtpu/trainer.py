"""A run, from a configuration to its results: set up, resume, train, sum up."""

import contextlib
from collections.abc import Set

import jax
from rich.console import Console

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.closing import closing_table, longer_command, write_sample
from jaxtpu.config import Config
from jaxtpu.errors import EXIT_OK, UserError
from jaxtpu.observe import console as screen
from jaxtpu.observe.memory import peak_memory
from jaxtpu.observe.tables import startup_rows
from jaxtpu.observe.watchdog import Watchdog
from jaxtpu.plan.oom import OutOfMemoryError, explain_run, naming
from jaxtpu.processes import check_same, primary
from jaxtpu.rollback import first_state, train_on
from jaxtpu.setup import (
    Setup,
    check_workdir,
    fingerprint,
    locked,
    set_up,
    use_compile_cache,
    write_config,
)


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
    state, position = first_state(setup, checkpoints, saved, out, watchdog)
    write_config(config)
    compiling = screen.busy(out, "compiled the train step")
    with compiling, watchdog.phase("compile"), naming("the train step"):
        train_step = setup.programs.train_step.lower(
            setup.programs.abstract_state, setup.programs.abstract_batch
        ).compile()
    try:
        with naming("training"):
            run, state, step, stopped_by = train_on(
                setup, checkpoints, train_step, (state, position, start), out, watchdog, rows
            )
    finally:
        checkpoints.close()
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


def _say_finished(out: Console, config: Config, steps: int, command: str) -> None:
    out.print(f"\nThis run is finished: {steps} steps are done.")
    screen.commands(out, [("To train longer", longer_command(command, config, steps))])
