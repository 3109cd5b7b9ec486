"""What a step went wrong on: named, dumped, and run again by `run.py debug-step`."""

import contextlib
import dataclasses
import math
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.checkpoint.folder import directory_of
from jaxtpu.checkpoint.read import reason
from jaxtpu.checkpoint.store import SaveError
from jaxtpu.config import CheckpointConfig, Config
from jaxtpu.data.order import Position, as_mixture, example_ids, taken_before
from jaxtpu.errors import EXIT_OK, UserError
from jaxtpu.observe import console as screen
from jaxtpu.observe.watchdog import Watchdog
from jaxtpu.paths import flatten
from jaxtpu.processes import agree, primary
from jaxtpu.setup import Setup, set_up
from jaxtpu.train.loop import NonFinite
from jaxtpu.train.programs import Programs

_NAMED = 16  # examples, and layers, that a message has room for


def what_went_wrong(error: NonFinite) -> str:
    """In words: which number, and when."""
    values = {name: float(error.metrics[name]) for name in ("loss", "grad_norm")}
    wrong = next((name for name, value in values.items() if not math.isfinite(value)), "loss")
    return f"the {wrong} is {values[wrong]} at step {error.step}"


def stopped(
    setup: Setup, checkpoints: Checkpoints, error: NonFinite, watchdog: Watchdog
) -> UserError:
    """The error that ends the run, after the step was looked at and dumped."""
    config = setup.config
    examples = _examples(setup, error.before, error.after)
    dumped = _dumped(config, error, examples, watchdog)  # first: to look takes memory
    try:
        with watchdog.phase("compile"):
            found = examine(setup.programs, error.state, error.batch).in_words()
    except jax.errors.JaxRuntimeError as failure:
        found = f"where it begins is not known, for looking failed: {reason(failure)}"
    in_row = int(error.metrics["dropped"])
    lines = [
        f"{what_went_wrong(error)}, so the run has stopped"
        + (f", after {in_row} updates in a row that had to be dropped." if in_row > 1 else "."),
        f"  {found}",
        f"  its examples: {_in_words(examples)}",
        f"  {dumped}",
        f"  checkpoints in {checkpoints.directory}: {checkpoints.kept or 'none'}",
        f"Try a lower optimizer.learning_rate (now {config.optimizer.learning_rate:g}), a longer "
        "optimizer.warmup, or optimizer.clip_norm=1; guard.nonfinite=skip drops such updates, "
        "guard.nonfinite=rollback goes back and past them.",
    ]
    return UserError("\n".join(lines))


def _dumped(config: Config, error: NonFinite, examples: list, watchdog: Watchdog) -> str:
    """Writes the state before the step and its batch; says where, or why not."""
    folder = _folder(config)
    with contextlib.suppress(OSError):
        if primary() and folder.is_dir():
            folder.rmtree()
    if agree("whether an older dump is left", folder.exists()):
        return f"its state and batch could not be written: {folder} could not be deleted"
    record = {"config": config.to_dict(), "seed": config.seed}
    dump = Checkpoints(config.workdir, _settings(folder), record)
    position = {"examples": examples, "before": error.before.to_json()}
    try:
        with watchdog.phase("save"):
            dump.save(error.step, {"state": error.state, "batch": error.batch}, position, None)
            dump.wait()
    except SaveError as failure:
        return f"its state and batch could not be written: {failure}"
    finally:
        dump.close()
    replay = f"python run.py debug-step --workdir={shlex.quote(config.workdir)}"
    return f"its state and batch are in {folder}; to run it again: {replay}"


def debug_step(config: Config) -> int:
    """Runs the dumped step of a run again and shows what is not finite in it.

    Args:
      config: of the run; its precision may be another.

    Raises:
      UserError: there is no dump.
    """
    folder = _folder(config)
    dump = Checkpoints(config.workdir, _settings(folder))
    try:
        step = dump.newest_whole(set_aside=False) if folder.exists() else None
        if step is None:
            raise UserError(
                f"{folder} holds no dump: a run writes one where it stops for a loss or a gradient "
                "that is not finite."
            )
        programs = set_up(config).programs
        abstract = {"state": programs.abstract_state, "batch": programs.abstract_batch}
        saved, position = dump.restore(abstract, step)
    finally:
        dump.close()
    found = examine(programs, saved["state"], saved["batch"])
    rows = [
        ("examples", _in_words(position["examples"])),
        ("loss", f"{found.loss:g}"),
        ("gradient norm", f"{found.norm:g}"),
        ("found", found.in_words()),
        *_largest(found.gradients),
    ]
    screen.table(screen.make_console(primary()), f"{config.name}: step {step} again", rows)
    return EXIT_OK


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a step computes, before its update.

    Attributes:
      loss: mean over the batch.
      norm: of the whole gradient.
      parameters: L2 norms by path; of parameters stacked over layers, of each layer.
      gradients: likewise.
    """

    loss: float
    norm: float
    parameters: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]

    def in_words(self) -> str:
        """The first parameter, or else gradient, that is not finite."""
        for kind, norms in (("parameter", self.parameters), ("gradient of", self.gradients)):
            bad = {path: values for path, values in norms.items() if not np.isfinite(values).all()}
            if bad:
                path, values = next(iter(bad.items()))
                layers = np.flatnonzero(~np.isfinite(values)).tolist() if values.ndim else []
                where = f", layers {_listed(layers)}" if layers else ""
                return f"not finite first: {kind} {path}{where} ({len(bad)} of {len(norms)} are)"
        if math.isfinite(self.loss):
            return "every number is finite when it is computed again: look at the machine"
        return "every parameter and gradient is finite, the loss is not"


def examine(programs: Programs, state: Any, batch: Any) -> Findings:
    """The norms of one step, made by the same gradient as that of training."""
    axes = programs.model.axes

    def norms(tree: Any) -> dict[str, jax.Array]:
        result = {}
        for path, leaf in flatten(tree).items():
            kept = 1 if axes[path][:1] == ("layers",) else 0
            square = jnp.square(leaf.astype(jnp.float32))
            result[path] = jnp.sqrt(jnp.sum(square, axis=tuple(range(kept, leaf.ndim))))
        return result

    def looked_at(params: Any, batch: Any, model_state: Any):
        gradient, tokens, sums = programs.gradient_of(params, batch, model_state)
        return sums["loss"] / tokens, norms(params), norms(gradient)

    everywhere = NamedSharding(programs.mesh, P())
    look = jax.jit(looked_at, out_shardings=everywhere)
    loss, parameters, gradients = jax.device_get(look(state.params, batch, state.model_state))
    squares = sum(float(np.sum(np.square(values))) for values in gradients.values())
    return Findings(float(loss), math.sqrt(squares), parameters, gradients)


def _largest(gradients: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    whole = {path: float(np.linalg.norm(values)) for path, values in gradients.items()}
    order = sorted(
        whole, key=lambda path: -whole[path] if math.isfinite(whole[path]) else -math.inf
    )
    return [("gradients", f"{path}: {whole[path]:g}") for path in order[:_NAMED]]


def _examples(setup: Setup, before: Position, after: Position) -> list[tuple[str, int]]:
    """(source, index) of each row of the batch between two positions."""
    data, mixture = setup.config.data, as_mixture(setup.stream)
    names = mixture.names if len(mixture.names) > 1 else (data.source,)
    counts = [
        len(one) if setup.tokenizer is None else one.examples(data.sequence_length)
        for one in mixture.streams
    ]
    taken = taken_before(before, mixture), taken_before(after, mixture)
    return example_ids(names, counts, taken, setup.config.seed)


def _in_words(examples: list) -> str:
    by_source: dict[str, list[int]] = {}
    for source, index in examples:
        by_source.setdefault(source, []).append(index)
    return "; ".join(f"{source} {_listed(numbers)}" for source, numbers in by_source.items())


def _listed(numbers: list[int]) -> str:
    rest = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return ", ".join(map(str, numbers[:_NAMED])) + rest


def _folder(config: Config) -> epath.Path:
    """In the run's folder, or with its checkpoints, where those are elsewhere: all hosts see them."""
    checkpoints = directory_of(config.workdir, config.checkpoint)
    return (checkpoints if config.checkpoint.directory else checkpoints.parent) / "debug"


def _settings(folder: epath.Path) -> CheckpointConfig:
    settings = CheckpointConfig()
    settings.directory = str(folder)
    return settings
