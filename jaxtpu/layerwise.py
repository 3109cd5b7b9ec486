"""The update of the parameters a part at a time: a layer after the other, or rows of a large matrix.

An optimizer is given one layer's arrays, without the first dimension that layers are stacked along:
it treats each layer's matrices as it would unstacked ones, however many there are. Run as a loop,
only the part that is being updated needs its temporaries, and its state if the rest is on the host.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax.transforms import MaskedNode

from jaxtpu.paths import flatten, map_with_path, owner

_MOST_PARTS = 16
# Arrays of a layer in one loop: each copy from or to the host holds a semaphore, and a v3 core has
# so few that seven matrices with three arrays of state each do not compile.
_MOST_ARRAYS = 4
_ROWS = 16  # a TPU tile of bfloat16 has as many: parts are whole tiles


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are updated together, cut into parts of equal size.

    Attributes:
      paths: of the parameters.
      parts: how many.
      layers: whether a part is a layer; otherwise it is some rows of a matrix.
      looped: whether a loop runs over the parts; otherwise all layers are mapped over at once.
      divided: into how many parts the mesh divides the rows: each is cut by itself.
    """

    paths: frozenset[str]
    parts: int = 1
    layers: bool = False
    looped: bool = False
    divided: int = 1

    def stack(self, array: jax.Array) -> jax.Array:
        """The array as the loop sees it: its parts lie along a dimension of their own.

        Nothing is moved. Columns would not do: the copies from the host take whole lanes.
        """
        if self.layers:
            return array
        rows = array.shape[0] // (self.divided * self.parts)
        return array.reshape(self.divided, self.parts, rows, *array.shape[1:])

    def take(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """A part of a stacked array; that dimension is kept, with length 1."""
        return jax.lax.dynamic_slice_in_dim(array, part, 1, axis=0 if self.layers else 1)

    def put(self, array: jax.Array, piece: jax.Array, part: jax.Array) -> jax.Array:
        """The stacked array with a part replaced."""
        return jax.lax.dynamic_update_slice_in_dim(array, piece, part, axis=0 if self.layers else 1)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the parameters are updated, and which state is on the host.

    Attributes:
      groups: every parameter is in one of them.
      host_paths: parameters whose matching state (of the parameter's own shape) is on the host.
    """

    groups: tuple[Group, ...]
    host_paths: frozenset[str] = frozenset()

    def on_host(self, state: Any, params: Any) -> Any:
        """Tree of flags: whether a leaf of the optimizer state lives on the host."""
        shapes = {path: leaf.shape for path, leaf in flatten(params).items()}

        def one(path: str, leaf) -> bool:
            of = owner(path, shapes)
            return of in self.host_paths and leaf.shape == shapes[of]

        return map_with_path(one, state)


def make_layout(
    params: Any, stacked: Sequence[str], *, looped: bool, host: bool, cut: dict[str, int]
) -> Layout:
    """Layers together; what is not stacked together too, but for the matrices that are cut.

    Args:
      params: abstract.
      stacked: paths of the parameters whose first dimension is that of the layers.
      looped: whether the layers are updated one after another.
      host: whether the state of matrices is on the host; what vectors have is too small to move.
      cut: by path of a matrix that is updated some rows at a time, the parts into which the mesh
        divides its rows.
    """
    leaves = flatten(params)
    groups = []
    if stacked:
        depth = leaves[stacked[0]].shape[0]
        together = _MOST_ARRAYS if looped else len(stacked)
        for first in range(0, len(stacked), together):
            paths = frozenset(stacked[first : first + together])
            groups.append(Group(paths, depth, layers=True, looped=looped))
    for path, divided in cut.items():
        parts = _parts(leaves[path].shape[0] // divided)
        if parts > 1:
            groups.append(Group(frozenset({path}), parts, looped=True, divided=divided))
    known = frozenset().union(*(group.paths for group in groups))
    if rest := frozenset(leaves) - known:
        groups.append(Group(rest))
    matrices = {p for p, leaf in leaves.items() if leaf.ndim - (p in set(stacked)) >= 2}
    return Layout(tuple(groups), frozenset(matrices if host else ()))


def _parts(rows: int) -> int:
    """Into how many parts of whole tiles so many rows are cut."""
    return next((n for n in range(_MOST_PARTS, 1, -1) if rows % (n * _ROWS) == 0), 1)


def init_layerwise(init: Callable[[Any], Any], params: Any, stacked: Sequence[str]) -> Any:
    """The state of an optimizer that sees one layer at a time: layers' states are stacked."""
    template, leaves = jax.eval_shape(init, params), flatten(params)
    layers = {path: leaves.pop(path) for path in stacked}
    flat = flatten(init(_masked(params, leaves)))
    if layers:
        of_layers = [path for path in flatten(template) if owner(path, layers)]
        one = lambda layer: _only(flatten(init(_masked(params, layer))), of_layers)  # noqa: E731
        flat |= jax.vmap(one)(layers)
    return map_with_path(lambda path, _: flat[path], template)


def update_layerwise(
    update: Callable[..., tuple[Any, Any]],
    layout: Layout,
    gradient: Any,
    state: Any,
    params: Any,
    moved: bool,
) -> tuple[Any, Any]:
    """(params, state) after an update, which is made group after group.

    Args:
      update: (gradient, state, params, part) -> (params, state), of trees in which only some leaves
        are there, the others `optax.MaskedNode`; `part` is its number, int32.
      gradient, params: trees of the same structure.
      state: as `init_layerwise` makes it.
      moved: whether the state that `layout` has on the host is there, and moved to the device part
        by part; otherwise it is taken to be on the device.
    """
    gradients, leaves, states = flatten(gradient), flatten(params), flatten(state)
    owners = {path: owner(path, leaves) for path in states}
    shared = {path: leaf for path, leaf in states.items() if owners[path] is None}
    far = {path for path, there in flatten(layout.on_host(state, params)).items() if there & moved}
    fetch = lambda path, x: jax.device_put(x, jax.memory.Space.Device) if path in far else x  # noqa: E731
    keep = lambda path, x: jax.device_put(x, jax.memory.Space.Host) if path in far else x  # noqa: E731

    def one(part, gradients, moments, leaves):
        new_params, new_state = update(
            _masked(params, gradients),
            _masked(state, moments | shared),
            _masked(params, leaves),
            part,
        )
        new_state = flatten(new_state)
        return flatten(new_params), _only(new_state, moments), _only(new_state, shared)

    new_leaves, new_states = {}, {}
    for group in layout.groups:
        moments = {path: leaf for path, leaf in states.items() if owners[path] in group.paths}
        arguments = (_only(gradients, group.paths), moments, _only(leaves, group.paths))
        if group.looped:
            found = _loop(group, one, arguments, shared, fetch, keep)
        elif group.layers:
            found = jax.vmap(one, out_axes=(0, 0, None))(jnp.arange(group.parts), *arguments)
        else:
            near = {path: fetch(path, leaf) for path, leaf in moments.items()}
            found = one(jnp.int32(0), arguments[0], near, arguments[2])
            found = (found[0], {path: keep(path, x) for path, x in found[1].items()}, found[2])
        new_leaves |= found[0]
        new_states |= found[1] | found[2]
    by_path = lambda flat: lambda path, _: flat[path]  # noqa: E731
    return map_with_path(by_path(new_leaves), params), map_with_path(by_path(new_states), state)


def _loop(group: Group, one, arguments, shared, fetch, keep):
    """`one` on part after part; parameters and state are replaced where they are."""
    shapes = {path: x.shape for path, x in (arguments[1] | arguments[2]).items()}
    gradients, moments, leaves = jax.tree.map(group.stack, arguments)

    def body(part, carry):
        leaves, moments, _ = carry
        near = {path: fetch(path, group.take(x, part)) for path, x in moments.items()}
        pieces = (
            {path: group.take(x, part) for path, x in gradients.items()},
            near,
            {path: group.take(x, part) for path, x in leaves.items()},
        )
        if group.layers:
            pieces = jax.tree.map(lambda x: x[0], pieces)
        new_leaves, new_moments, new_shared = one(part, *pieces)
        if group.layers:
            new_leaves, new_moments = jax.tree.map(lambda x: x[None], (new_leaves, new_moments))
        return (
            {path: group.put(leaves[path], x, part) for path, x in new_leaves.items()},
            {
                path: group.put(moments[path], keep(path, x), part)
                for path, x in new_moments.items()
            },
            new_shared,
        )

    *found, shared = jax.lax.fori_loop(0, group.parts, body, (leaves, moments, shared))
    leaves, moments = (
        {path: x.reshape(shapes[path]) for path, x in flat.items()} for flat in found
    )
    return leaves, moments, shared


def _masked(tree: Any, flat: dict[str, Any]) -> Any:
    """`tree` with the leaves that `flat` has by path; the others are `MaskedNode`, no leaf."""
    return map_with_path(lambda path, _: flat.get(path, MaskedNode()), tree)


def _only(flat: dict[str, Any], paths) -> dict[str, Any]:
    return {path: flat[path] for path in paths}
