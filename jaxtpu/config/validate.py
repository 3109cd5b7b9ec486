"""Checks across fields, all arithmetic: nothing here needs a device, so a bad run costs nothing."""

import math
import re

from jaxtpu.config.duration import Duration, RunUnits, to_steps
from jaxtpu.config.schema import Config, MeshConfig
from jaxtpu.config.validate_text import finalize_text
from jaxtpu.config.validate_vision import finalize_vision
from jaxtpu.config.vision import VISION_MODELS
from jaxtpu.errors import ConfigError, nearest, nearest_multiples

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")


def finalize(config: Config, num_devices: int, vocab_size: int) -> dict[str, int]:
    """Fills in the fields that were left to be derived, and checks that the fields fit together.

    Args:
      config: changed in place.
      num_devices: JAX devices in all processes.
      vocab_size: ids that the tokenizer uses; of images, the classes of the data.

    Returns:
      The size of each mesh axis.

    Raises:
      ConfigError: names the field, its value, and a value that works.
    """
    sizes = mesh_sizes(config.mesh, num_devices)
    if config.model.name in VISION_MODELS:
        finalize_vision(config, vocab_size)
    else:
        finalize_text(config, vocab_size)
    _check_rules(config)
    _check_batch(config, sizes)
    _check_length(config)
    _check_optimizer(config)
    if config.checkpoint.keep_best and not config.data.validation_split:
        config.checkpoint.keep_best = 0  # nothing to be best by
    return sizes


def mesh_sizes(mesh: MeshConfig, num_devices: int) -> dict[str, int]:
    """The size of each mesh axis, with -1 filled from `num_devices`.

    Raises:
      ConfigError: two axes of -1, a size that is not positive, or a product that is not the
        number of devices.
    """
    check_axes(mesh)
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and num_devices % fixed == 0:
        sizes[free[0]] = num_devices // fixed
    elif free or fixed != num_devices:
        raise _mesh_mismatch(sizes, fixed, num_devices, bool(free))
    return sizes


def check_axes(mesh: MeshConfig) -> None:
    """What holds of the axes for any number of devices.

    Raises:
      ConfigError: two axes of -1, or a size that is not positive.
    """
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    free = [axis for axis, size in sizes.items() if size == -1]
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise ConfigError(
                f"mesh.{axis}", size, "an axis has at least 1 device.", "Use 1, or -1 to fill up."
            )
    if len(free) > 1:
        raise ConfigError(
            f"mesh.{free[1]}", -1, f"only one axis can fill up; mesh.{free[0]} does.", "Use 1."
        )


def _mesh_mismatch(sizes: dict[str, int], fixed: int, devices: int, free: bool) -> ConfigError:
    """The largest axis is named, with the size nearest to it that makes the mesh fit."""
    axis = max(sizes, key=lambda name: sizes[name])
    others = fixed // sizes[axis]
    shape = " x ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, -1))
    relation = "does not divide" if free else "is not"
    problem = f"{shape or 'the mesh'} makes {fixed}, which {relation} the {devices} devices."
    fits = [n for n in range(1, devices + 1) if devices % (n * others) == 0]
    if not free:
        fits = [n for n in fits if n * others == devices]
    if fits:
        suggestion = f"Use mesh.{axis}={min(fits, key=lambda n: abs(n - sizes[axis]))}."
    else:
        suggestion = "Use mesh.data=1, mesh.fsdp=-1 and 1 for the other axes."
    return ConfigError(f"mesh.{axis}", sizes[axis], problem, suggestion)


def _axes(rule: str) -> list[str]:
    return [axis.strip() for axis in rule.split(",") if axis.strip()]


def _check_rules(config: Config) -> None:
    """The mesh axes in the rule table are spelled right, and none is twice in a rule."""
    for name, kind in config.sharding.types().items():
        if kind is not str:
            continue
        rule = getattr(config.sharding, name)
        axes = _axes(rule)
        for axis in axes:
            if axis not in MESH_AXES:
                words = re.findall(r"\w+", axis)
                separated = len(words) > 1 and set(words) <= set(MESH_AXES)
                raise ConfigError(
                    f"sharding.{name}", rule, f"{axis!r} is not a mesh axis.",
                    f"Use {','.join(words)!r}." if separated else nearest(axis, MESH_AXES),
                )  # fmt: skip
        if len(set(axes)) < len(axes):
            raise ConfigError(
                f"sharding.{name}", rule, "names a mesh axis twice.",
                f"Use {','.join(dict.fromkeys(axes))!r}.",
            )  # fmt: skip


def _check_batch(config: Config, sizes: dict[str, int]) -> None:
    data, micro = config.data, config.train.microbatches
    batch_axes = _axes(config.sharding.batch)
    parts = math.prod(sizes[axis] for axis in batch_axes)
    if data.batch_size % (parts * micro):
        causes = [f"divided over {_shape(batch_axes, sizes)}"] if parts > 1 else []
        causes += [f"run in train.microbatches={micro} parts"] if micro > 1 else []
        raise ConfigError(
            "data.batch_size", data.batch_size,
            f"must be a multiple of {parts * micro}: the batch is {' and '.join(causes)}.",
            nearest_multiples(data.batch_size, parts * micro),
        )  # fmt: skip
    # Where both rules name an axis, the batch has it: it is the left dimension.
    axes = [axis for axis in _axes(config.sharding.sequence) if axis not in batch_axes]
    parts = math.prod(sizes[axis] for axis in axes)
    if data.sequence_length % parts:
        raise ConfigError(
            "data.sequence_length", data.sequence_length,
            f"must be a multiple of {parts}: the sequence is divided over {_shape(axes, sizes)}.",
            nearest_multiples(data.sequence_length, parts),
        )  # fmt: skip


def _shape(axes: list[str], sizes: dict[str, int]) -> str:
    return " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes if sizes[axis] > 1)


def _check_length(config: Config) -> None:
    train = config.train
    if train.steps is not None and train.epochs is not None:
        raise ConfigError(
            "train.epochs", train.epochs, f"train.steps={train.steps!r} is set too; one is enough.",
            "Set train.steps=None, or train.epochs=None.",
        )  # fmt: skip
    if train.steps is None and train.epochs is None:
        raise ConfigError(
            "train.steps", None, "the length of the run is not set.",
            "Set train.steps=1000, or train.epochs=1.",
        )  # fmt: skip
    if not config.data.validation_split and config.train.evaluate_batches:
        raise ConfigError(
            "train.evaluate_batches", train.evaluate_batches,
            "data.validation_split is empty, so there is nothing to evaluate.",
            "Set data.validation_split, or train.evaluate_batches=0.",
        )  # fmt: skip


def _check_optimizer(config: Config) -> None:
    optimizer, params = config.optimizer, config.precision.params
    if optimizer.placement == "host" and optimizer.accumulate_steps > 1:
        raise ConfigError(
            "optimizer.placement", "host",
            f"goes with an update every step, not optimizer.accumulate_steps="
            f"{optimizer.accumulate_steps}.",
            "Use train.microbatches instead of accumulate_steps, or placement=device.",
        )  # fmt: skip
    if optimizer.rounding != "nearest" and params != "bfloat16":
        raise ConfigError(
            "optimizer.rounding", optimizer.rounding,
            f"is for bfloat16 parameters; precision.params={params} need no rounding.",
            "Use nearest, or precision.params=bfloat16.",
        )  # fmt: skip


def run_units(config: Config, examples: int | None) -> RunUnits:
    """What a step and an epoch amount to, and the number of steps of the run.

    Args:
      config: finalized.
      examples: sequences in the training data; None where that is not known.

    Raises:
      ConfigError: the run has no length, or it cannot be worked out; what should happen within
        the run does not.
    """
    train, batch_size = config.train, config.data.batch_size
    if examples == 0:
        raise ConfigError(
            "data.sequence_length", config.data.sequence_length,
            "the training split has fewer tokens than one sequence.", "Use less.",
        )  # fmt: skip
    steps_per_epoch = train.steps_per_epoch
    if steps_per_epoch is None and examples is not None:
        steps_per_epoch = max(1, examples // batch_size)
    units = RunUnits(None, steps_per_epoch, batch_size, batch_size * config.data.sequence_length)
    if train.epochs is not None:
        steps = to_steps("train.epochs", f"{train.epochs} epochs", units)
    else:
        steps = to_steps("train.steps", train.steps, units)
    if steps == 0:
        raise ConfigError("train.steps", train.steps, "a run has at least one step.", "Use 1.")
    units = RunUnits(steps, steps_per_epoch, batch_size, units.tokens_per_step)
    _check_durations(config, units)
    return units


def _check_durations(config: Config, units: RunUnits) -> None:
    """Durations are worked out where they are needed, which can be late: any fault is told now."""
    for section in (config.optimizer, config.train, config.checkpoint):
        for name, kind in section.types().items():
            if kind == Duration:
                to_steps(section.dotted(name), getattr(section, name), units)
    every = config.optimizer.accumulate_steps
    if every > units.steps:
        raise ConfigError(
            "optimizer.accumulate_steps", every,
            f"the run has {units.steps} steps, so the parameters would never change.",
            f"Use at most {units.steps}.",
        )  # fmt: skip
    if to_steps("train.profile_at", config.train.profile_at, units) >= units.steps:
        raise ConfigError(
            "train.profile_at", config.train.profile_at,
            f"nothing is left to profile: the run has {units.steps} steps.",
            f"Use at most {units.steps - 1}.",
        )  # fmt: skip
