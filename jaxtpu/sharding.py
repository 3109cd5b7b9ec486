"""From logical axis names to shardings: the rule table, the checks, the one constraint helper."""

import contextlib
import contextvars
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.config import ShardingConfig
from jaxtpu.errors import ConfigError, nearest_multiples
from jaxtpu.paths import flatten, map_with_path, owner

LogicalAxes = tuple[str | None, ...]
_ACTIVE: contextvars.ContextVar["Rules | None"] = contextvars.ContextVar("rules", default=None)
_PARAMETER_AXES = ("fsdp", "expert", "tensor")  # the mesh axes that exist to divide parameters


@dataclasses.dataclass(frozen=True)
class Undivided:
    """A dimension that its mesh axis does not divide.

    Attributes:
      path: parameter.
      logical_axis: name of the dimension.
      size: length of the dimension.
      mesh_axis: the axis that does not divide it.
      parts: size of the mesh axis.
      moved_to: the dimension that the mesh axis divides instead; None where none can be divided.
    """

    path: str
    logical_axis: str
    size: int
    mesh_axis: str
    parts: int
    moved_to: str | None

    def __str__(self) -> str:
        cause = f"{self.path}: {self.logical_axis}={self.size} is not divided by {self.mesh_axis}={self.parts}"
        if self.moved_to:
            return f"{cause}; stored divided along {self.moved_to}, gathered where it is used"
        return f"{cause}; every device along {self.mesh_axis} holds all of it"


@dataclasses.dataclass(frozen=True)
class Rules:
    """A mesh with the table that maps logical axes to its axes.

    Attributes:
      mesh: devices.
      table: by logical axis, the mesh axes that divide it, outermost first.
      mapped: mesh axes over which `jax.vmap` runs what is traced with these rules: no rule has them.
    """

    mesh: Mesh
    table: dict[str, tuple[str, ...]]
    mapped: tuple[str, ...] = ()

    def mesh_axes(self, logical_axis: str | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that divide `logical_axis`."""
        if logical_axis is None:
            return ()
        if logical_axis not in self.table:
            raise KeyError(f"no sharding rule for the logical axis {logical_axis!r}")
        return tuple(axis for axis in self.table[logical_axis] if self.mesh.shape[axis] > 1)

    def divides(self, logical_axis: str, size: int) -> bool:
        """Whether the table's mesh axes divide a dimension of `size` exactly."""
        return size % math.prod(self.mesh.shape[a] for a in self.mesh_axes(logical_axis)) == 0

    def spec(self, axes: LogicalAxes, shape: tuple[int, ...]) -> P:
        """The `PartitionSpec` of an activation: what does not divide stays undivided."""
        return self._place(axes, shape)[0]

    def parameter_spec(
        self, path: str, axes: LogicalAxes, shape: tuple[int, ...]
    ) -> tuple[P, list[Undivided]]:
        """The spec of a parameter: a mesh axis that does not divide its own dimension divides the
        longest other one that it can, since memory counts for more than where it is divided."""
        spec, left = self._place(axes, shape)
        parts = [list(_as_tuple(entry)) for entry in spec]
        notes = []
        for logical_axis, size, mesh_axis in left:
            count = self.mesh.shape[mesh_axis]
            others = [
                dim
                for dim, axis in enumerate(axes)
                if axis not in (None, "layers", logical_axis)
                and shape[dim] % (count * math.prod(self.mesh.shape[a] for a in parts[dim])) == 0
            ]
            target = max(others, key=lambda dim: shape[dim], default=None)
            if target is not None:
                parts[target].append(mesh_axis)
            moved_to = None if target is None else axes[target]
            notes.append(Undivided(path, logical_axis, size, mesh_axis, count, moved_to))
        return P(*(_as_entry(tuple(names)) for names in parts)), notes

    def _place(self, axes: LogicalAxes, shape: tuple[int, ...]):
        """Left to right, each dimension takes the mesh axes of its rule that are free and divide it."""
        used: set[str] = set()
        entries, left = [], []
        for logical_axis, size in zip(axes, shape, strict=True):
            taken: list[str] = []
            parts = 1
            for mesh_axis in self.mesh_axes(logical_axis):
                if mesh_axis in used:
                    continue
                used.add(mesh_axis)
                if size % (parts * self.mesh.shape[mesh_axis]) == 0:
                    taken.append(mesh_axis)
                    parts *= self.mesh.shape[mesh_axis]
                else:
                    left.append((logical_axis, size, mesh_axis))
            entries.append(_as_entry(tuple(taken)))
        return P(*entries), left

    def mapped_over(self, mesh_axis: str) -> "Rules":
        """These rules for what `jax.vmap` runs over a mesh axis, as its `spmd_axis_name`."""
        table = {
            name: tuple(axis for axis in axes if axis != mesh_axis)
            for name, axes in self.table.items()
        }
        return Rules(self.mesh, table, (*self.mapped, mesh_axis))

    @contextlib.contextmanager
    def active(self):
        """Within this context (entered while a step is traced) `constrain` uses these rules."""
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)


def _as_tuple(entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _as_entry(names: tuple[str, ...]):
    return None if not names else names[0] if len(names) == 1 else names


def make_rules(config: ShardingConfig, mesh: Mesh) -> Rules:
    """The rule table of the config, on a mesh."""
    table = {
        name: tuple(axis.strip() for axis in getattr(config, name).split(",") if axis.strip())
        for name, kind in config.types().items()
        if kind is str
    }
    return Rules(mesh, table)


def active_rules() -> Rules | None:
    """The rules of the step being traced; None outside of one."""
    return _ACTIVE.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Divides the activation `x` by the logical names of its dimensions; a no-op without rules."""
    rules = active_rules()
    if rules is None or rules.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(rules.mesh, rules.spec(axes, x.shape)))


def parameter_shardings(
    rules: Rules, axes: Any, abstract_params: Any
) -> tuple[Any, list[Undivided]]:
    """The sharding of each parameter, and what could not be divided as the table says.

    Args:
      axes: logical axes by path.
      abstract_params: tree of shapes.
    """
    notes: list[Undivided] = []

    def one(path: str, leaf) -> NamedSharding:
        spec, undivided = rules.parameter_spec(path, axes[path], leaf.shape)
        notes.extend(undivided)
        return NamedSharding(rules.mesh, spec)

    return map_with_path(one, abstract_params), notes


def like_parameters(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shardings for an optimizer state: a leaf whose path ends with a parameter's path is divided
    as the parameter is; a factored moment, which lacks one of its dimensions, as the rest is.

    Args:
      tree: abstract optimizer state.
      params: abstract parameters.
      shardings: sharding of each parameter.
    """
    by_path = {path: (leaf.shape, leaf.sharding) for path, leaf in flatten(
        jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings)
    ).items()}  # fmt: skip

    def one(path: str, leaf) -> NamedSharding:
        of = owner(path, by_path)
        return NamedSharding(mesh, _reduced_spec(leaf.shape, *by_path[of]) if of else P())

    return map_with_path(one, tree)


def on_host(shardings: Any, flags: Any) -> Any:
    """`shardings`, in pinned host memory where the tree `flags` says so."""
    place = lambda s, there: s.with_memory_kind("pinned_host") if there else s  # noqa: E731
    return jax.tree.map(place, shardings, flags)


def row_parts(shardings: Any) -> dict[str, int]:
    """By path of a parameter, the parts into which the mesh divides its first dimension."""
    rows = lambda s: math.prod(s.mesh.shape[axis] for axis in _as_tuple((*s.spec, None)[0]))  # noqa: E731
    return {path: rows(sharding) for path, sharding in flatten(shardings).items()}


def _reduced_spec(shape: tuple[int, ...], full: tuple[int, ...], sharding: NamedSharding) -> P:
    entries = list(sharding.spec) + [None] * (len(full) - len(sharding.spec))
    if shape == full:
        return P(*entries)
    for dim in range(len(full)):
        if full[:dim] + full[dim + 1 :] == shape:
            return P(*(entries[:dim] + entries[dim + 1 :]))
    return P()


def check_divided(
    rules: Rules, axes: dict[str, LogicalAxes], abstract_params: Any, shardings: Any, limit: float
) -> None:
    """Fails when a mesh axis that should divide the parameters leaves too much of them undivided.

    Args:
      axes: logical axes by path.

    Raises:
      ConfigError: more than `limit` of the parameter bytes is not divided by fsdp, expert or
        tensor although that axis has several devices; the largest such parameters are named.
    """
    leaves = flatten(abstract_params)
    specs = {path: sharding.spec for path, sharding in flatten(shardings).items()}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    for mesh_axis in _PARAMETER_AXES:
        if rules.mesh.shape[mesh_axis] == 1:
            continue
        whole = {
            path: leaf.size * leaf.dtype.itemsize
            for path, leaf in leaves.items()
            if not any(mesh_axis in _as_tuple(entry) for entry in specs[path])
        }
        if sum(whole.values()) > limit * total:
            largest = sorted(whole, key=whole.get, reverse=True)[:3]
            names = ", ".join(f"{path} {tuple(leaves[path].shape)}" for path in largest)
            raise ConfigError(
                f"mesh.{mesh_axis}", rules.mesh.shape[mesh_axis],
                f"every device along it would hold all of {sum(whole.values()) / total:.2%} of the "
                f"parameter bytes (sharding.max_replicated={limit:g} allows {limit:.2%}), "
                f"mostly {names}.",
                _how_to_divide(rules, mesh_axis, [(axes[p], leaves[p].shape) for p in largest]),
            )  # fmt: skip


def _how_to_divide(
    rules: Rules, mesh_axis: str, arrays: list[tuple[LogicalAxes, tuple[int, ...]]]
) -> str:
    """What would let `mesh_axis` divide `arrays`, given as (logical axes, shape)."""
    parts = rules.mesh.shape[mesh_axis]
    names = [name for name, mesh_axes in rules.table.items() if mesh_axis in mesh_axes]
    names = [name for name in names if name not in ("batch", "sequence", "residual")]
    if not names:
        usual = [f"sharding.{name}={rule}" for name, rule in ShardingConfig().to_dict().items()
                 if rule == mesh_axis]  # fmt: skip
        return (
            f"No rule divides parameters by it: set {', '.join(usual)}, or mesh.{mesh_axis}=1, or "
            f"sharding.max_replicated=1 where it is meant."
        )
    for axes, shape in arrays:
        for name, size in zip(axes, shape, strict=True):
            if name in names and size % parts:
                return (
                    f"{name}={size} cannot be divided by {parts}. {nearest_multiples(size, parts)}"
                )
    return (
        f"They have no dimension called {' or '.join(names)}: use mesh.{mesh_axis}=1 and more "
        f"devices on another axis."
    )
