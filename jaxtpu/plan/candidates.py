"""The candidates: every mesh, and every value of the other knobs, that the config leaves open."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from jaxtpu.config import Config, OptimizerConfig, leaves
from jaxtpu.config.validate import MESH_AXES, mesh_sizes
from jaxtpu.errors import ConfigError, nearest_multiples
from jaxtpu.hardware import Slice
from jaxtpu.kernels.attention import choose_attention
from jaxtpu.kernels.scores import scores_of
from jaxtpu.models.sizes import padded_mlp

# What is cheapest in time first.
_REMAT = ("none", "dots", "save_attention", "save_attention_out", "full")
_MOST_MICROBATCHES = 16
# Axes that a plan may use. `expert` divides nothing in a dense model that `data` does not: it takes
# part where the user sets it.
_OPEN_AXES = ("data", "fsdp", "context", "tensor")
_MESH_FIELDS = tuple(f"mesh.{axis}" for axis in MESH_AXES)
KNOBS = (
    "model.remat", "model.remat_group", "model.attention", "train.microbatches",
    "optimizer.placement",
)  # fmt: skip
_SHORT = {
    "train.microbatches": "{} microbatches",
    "model.remat_group": "groups of {} layers",
    "model.attention": "{} attention",
    "optimizer.placement": "optimizer on the {}",
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a configuration on a slice.

    Attributes:
      mesh: size of each axis of `MESH_AXES`.
      knobs: (dotted name, value) of the other fields, in the order of `KNOBS`.
    """

    mesh: tuple[int, ...]
    knobs: tuple[tuple[str, Any], ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(MESH_AXES, self.mesh, strict=True))

    def __getitem__(self, knob: str) -> Any:
        return dict(self.knobs)[knob]

    def apply(self, config: Config) -> Config:
        """A copy of `config` that runs this way."""
        changed = copy.deepcopy(config)
        changed.mesh.update({"auto": False, **self.sizes})
        changed.update(dict(self.knobs))
        return changed

    def flags(self) -> str:
        """The command line words that choose this candidate."""
        fields = [(f"mesh.{axis}", size) for axis, size in self.sizes.items()]
        return " ".join(f"--config.{name}={value}" for name, value in [*fields, *self.knobs])

    def mesh_words(self) -> str:
        axes = [f"{axis} {size}" for axis, size in self.sizes.items() if size > 1]
        return " x ".join(axes) or "one device"

    def __str__(self) -> str:
        usual = ("optimizer.placement", "device"), ("model.remat_group", 1)
        words = [_SHORT.get(k[0], "{}").format(k[1]) for k in self.knobs if k not in usual]
        return ", ".join([self.mesh_words(), *words])


def fixed_fields(config: Config, given: set[str], opened: set[str]) -> set[str]:
    """Dotted names of the fields whose value stays: what the file or the command line sets.

    Args:
      config: as loaded.
      given: names that the command line sets.
      opened: names to try all the same; `mesh` stands for all its axes.

    Raises:
      ConfigError: `opened` has a name that a plan does not vary.
    """
    varied = {*_MESH_FIELDS, *KNOBS}
    for name in opened - varied - {"mesh"}:
        raise ConfigError(
            "--open", name, "is not a field that a plan varies.",
            f"There are: mesh, {', '.join(KNOBS)}.",
        )  # fmt: skip
    defaults = dict(leaves(Config()))
    changed = {name for name, value in leaves(config) if value != defaults[name]}
    fixed = {name for name in varied if name in given | changed}
    return fixed - opened - set(_MESH_FIELDS if "mesh" in opened else ())


def candidate_of(config: Config, slice_: Slice) -> Candidate:
    """The candidate that `config` itself is on a slice."""
    sizes = mesh_sizes(config.mesh, slice_.devices)
    attention = _chosen(config, config.model.attention, slice_, sizes["context"])
    values = dict(leaves(config)) | {"model.attention": attention}
    knobs = tuple((name, values[name]) for name in KNOBS)
    return Candidate(tuple(sizes[axis] for axis in MESH_AXES), knobs)


def candidates(config: Config, slice_: Slice, fixed: set[str]) -> Iterator[Candidate]:
    """Every candidate that fits together by arithmetic.

    Args:
      config: gives the batch, and the value of whatever is fixed.
      slice_: its number of devices is the product of a mesh.
      fixed: dotted names of fields that keep their value.
    """
    for mesh in _meshes(config, slice_, fixed):
        sizes = dict(zip(MESH_AXES, mesh, strict=True))
        rows, rest = divmod(config.data.batch_size, _batch_parts(config, sizes))
        if rest or not rows or not _divides_model(config, sizes):
            continue
        for values in itertools.product(*_choices(config, slice_, sizes, rows, fixed)):
            candidate = Candidate(mesh, tuple(zip(KNOBS, values, strict=True)))
            grouped = candidate["model.remat_group"] > 1 and "model.remat_group" not in fixed
            if candidate["model.remat"] == "full" or not grouped:
                yield candidate


def _meshes(config: Config, slice_: Slice, fixed: set[str]) -> Iterator[tuple[int, ...]]:
    choices = []
    for axis, name in zip(MESH_AXES, _MESH_FIELDS, strict=True):
        value = getattr(config.mesh, axis)
        if name in fixed and value != -1:
            choices.append([value])
        elif axis in _OPEN_AXES or value == -1:
            choices.append(_divisors(slice_.devices))
        else:
            choices.append([1])
    for mesh in itertools.product(*choices):
        across = crossing(mesh, slice_.slices)
        if math.prod(mesh) == slice_.devices and math.prod(across.values()) == slice_.slices:
            yield mesh


def crossing(mesh: tuple[int, ...], slices: int) -> dict[str, int]:
    """How many slices each mesh axis spans, the outermost axes first; axes within one are left out.

    Their product is below `slices` where no axes can be laid across them.
    """
    found = {}
    for axis, size in zip(MESH_AXES, mesh, strict=True):
        across = math.gcd(size, slices)
        slices //= across
        if across > 1:
            found[axis] = across
    return found


def _divides_model(config: Config, sizes: dict[str, int]) -> bool:
    """An axis that does not divide the sequence, or heads and MLP, would only replicate work."""
    tensor, length = sizes["tensor"], config.data.sequence_length
    whole = config.model.heads % tensor == 0 and padded_mlp(config.model) % tensor == 0
    return whole and length % sizes["context"] == 0


def _choices(
    config: Config, slice_: Slice, sizes: dict[str, int], rows: int, fixed: set[str]
) -> list[list[Any]]:
    """The values of each of `KNOBS` on a mesh where a device has `rows` sequences."""
    open_choices = {
        "model.remat": lambda: ["full"] if config.model.remat_tensors else list(_REMAT),
        "model.remat_group": lambda: sorted({1, _square_root(config.model.layers)}),
        "model.attention": lambda: _attention(config, slice_, sizes["context"]),
        "train.microbatches": lambda: [n for n in _divisors(rows) if n <= _MOST_MICROBATCHES],
        "optimizer.placement": lambda: _placements(config.optimizer),
    }
    values = dict(leaves(config))
    if "model.attention" in fixed:  # what runs, where it is not what was asked for
        asked = config.model.attention
        values["model.attention"] = _chosen(config, asked, slice_, sizes["context"])
    chosen = [[values[name]] if name in fixed else open_choices[name]() for name in KNOBS]
    if "train.microbatches" in fixed and rows % config.train.microbatches:
        chosen[KNOBS.index("train.microbatches")] = []
    return chosen


def _attention(config: Config, slice_: Slice, context: int) -> list[str]:
    """What `auto` takes on the slice, and the best that needs no kernel."""
    best = _chosen(config, "auto", slice_, context)
    plain = _chosen(config, "auto", slice_, 2)
    return list(dict.fromkeys([best, plain]))


def _chosen(config: Config, name: str, slice_: Slice, context: int) -> str:
    """The implementation that `model.attention=name` is on the slice."""
    kind, length = slice_.generation.device_kinds[0], config.data.sequence_length
    special = scores_of(config.model).special
    return choose_attention(name, kind, length, context, special)[0]


def _square_root(layers: int) -> int:
    """The size of groups that keeps the least: near the root, and a divisor if there is one."""
    least = lambda group: layers / group + group  # noqa: E731
    divisors = [n for n in _divisors(layers) if least(n) < 1.2 * least(math.sqrt(layers))]
    return min(divisors, key=least, default=round(math.sqrt(layers)))


def _placements(optimizer: OptimizerConfig) -> list[str]:
    """The host too, where there is state worth moving, and an update every step."""
    lean = optimizer.name == "adafactor" or (optimizer.name == "sgd" and not optimizer.beta1)
    movable = optimizer.accumulate_steps == 1 and (not lean or optimizer.rounding == "master")
    return ["device", "host"] if movable else ["device"]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def no_candidate(config: Config, slice_: Slice, fixed: set[str]) -> ConfigError:
    """Why there is no candidate, in terms of a field that can be changed."""
    meshes = [dict(zip(MESH_AXES, m, strict=True)) for m in _meshes(config, slice_, fixed)]
    set_axes = {name: getattr(config.mesh, name[5:]) for name in _MESH_FIELDS if name in fixed}
    words = " x ".join(f"{name}={size}" for name, size in set_axes.items())
    if not meshes:
        return ConfigError(
            "mesh", words, f"makes no mesh of the {slice_.devices} devices of {slice_.name}.",
            "Add --open=mesh to try others.",
        )  # fmt: skip
    length = config.data.sequence_length
    if all(length % sizes["context"] for sizes in meshes):
        return ConfigError(
            "data.sequence_length", length, f"mesh.context={config.mesh.context} does not divide it.",
            nearest_multiples(length, config.mesh.context),
        )  # fmt: skip
    divided = [sizes for sizes in meshes if _divides_model(config, sizes)]
    if not divided:
        return ConfigError(
            "mesh.tensor", config.mesh.tensor,
            f"does not divide model.heads={config.model.heads} and model.mlp={config.model.mlp}.",
            "Add --open=mesh to try others.",
        )  # fmt: skip
    parts = min(_batch_parts(config, sizes) for sizes in divided)
    if config.data.batch_size % parts:
        return ConfigError(
            "data.batch_size", config.data.batch_size,
            f"is divided by no mesh of {slice_.name}: the least that a mesh divides it into is "
            f"{parts} parts.", nearest_multiples(config.data.batch_size, parts),
        )  # fmt: skip
    return ConfigError(
        "train.microbatches", config.train.microbatches,
        "does not divide the sequences of a device on any mesh.",
        "Add --open=train.microbatches to try others.",
    )  # fmt: skip


def _batch_parts(config: Config, sizes: dict[str, int]) -> int:
    axes = filter(None, (axis.strip() for axis in config.sharding.batch.split(",")))
    return math.prod(sizes[axis] for axis in axes)
