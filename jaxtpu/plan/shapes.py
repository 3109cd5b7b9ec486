"""Shapes of HLO: what an array takes in a TPU's memory, its dimensions padded to whole tiles."""

import dataclasses
import functools
import math
import re

from jaxtpu.plan.hlo_text import closing

HBM, VMEM, HOST = 0, 1, 5  # memory spaces, S(n) of a layout; all others are on the chip too
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_LAYOUT_PART = re.compile(r"([A-Z]+)((?:\([^()]*\))+)")
_SEPARATOR = re.compile(r"(?:[\s,]|/\*[^*]*\*/)*")  # commas and comments between elements


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array in memory.

    Attributes:
      dtype: `bf16`, `f32`, `pred`, `token`, ...
      dims: sizes, in the order that the program names them.
      layout: minor_to_major: indices into `dims`, the fastest varying first.
      tiles: tiles of the layout, outermost first: `T(8,128)(2,1)` is ((8, 128), (2, 1)).
      memory_space: 0 HBM, 1 VMEM, 5 pinned host memory, others on the chip.
      element_bits: bits that an element takes in memory.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = 0
    element_bits: int = 32

    @property
    def leaves(self) -> tuple["Shape", ...]:
        """Itself, for symmetry with tuples."""
        return (self,)

    @property
    def num_elements(self) -> int:
        """Elements without padding."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return -(-self.num_elements * self.element_bits // 8)

    @functools.cached_property
    def tiled_bytes(self) -> int:
        """Bytes in memory, the dimensions padded to whole tiles."""
        sizes = [self.dims[i] for i in reversed(self.layout)]
        for tile in self.tiles:
            sizes = _tiled(sizes, tile)
        return -(-math.prod(sizes) * self.element_bits // 8)


@dataclasses.dataclass(frozen=True)
class TupleShape:
    """A tuple of arrays and tuples."""

    elements: tuple["Shape | TupleShape", ...]

    @functools.cached_property
    def leaves(self) -> tuple[Shape, ...]:
        """The arrays, nested tuples flattened."""
        return tuple(leaf for element in self.elements for leaf in element.leaves)

    @property
    def num_elements(self) -> int:
        """Elements of all arrays without padding."""
        return sum(leaf.num_elements for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays without padding."""
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def tiled_bytes(self) -> int:
        """Bytes of all arrays in memory, padded to whole tiles."""
        return sum(leaf.tiled_bytes for leaf in self.leaves)


def _tiled(sizes: list[int], tile: tuple[int, ...]) -> list[int]:
    """`sizes` (major to minor) with its minor end cut into whole tiles: blocks, then `tile`."""
    while tile[0] < 0:  # T(*,128): joined with the next minor dimension
        at = len(sizes) - len(tile)
        sizes = sizes[:at] + [sizes[at] * sizes[at + 1]] + sizes[at + 2 :]
        tile = tile[1:]
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    at = len(sizes) - len(tile)
    blocks = [-(-size // part) for size, part in zip(sizes[at:], tile, strict=True)]
    return sizes[:at] + blocks + list(tile)


def shape_end(text: str, start: int) -> int:
    """Where the shape that begins at `start` of `text` ends; `start` where there is none."""
    if not text.startswith("(", start):
        found = _ARRAY.match(text, start)
        return found.end() if found else start
    return closing(text, start + 1) + 1 or start


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape | TupleShape:
    """The shape printed as `text`.

    Raises:
      ValueError: it is no shape.
    """
    if text.startswith("("):
        return TupleShape(tuple(parse_shape(part) for part in _tuple_parts(text)))
    found = _ARRAY.fullmatch(text)
    if not found:
        raise ValueError(f"no shape: {text[:100]!r}")
    dtype, sizes, layout = found[1], found[2], found[3] or ""
    dims = tuple(int(size.strip("<=?") or 0) for size in sizes.split(",") if size)
    order, _, notes = layout.partition(":")
    parts = dict(_LAYOUT_PART.findall(notes))
    return Shape(
        dtype, dims,
        tuple(int(i) for i in order.split(",")) if order else tuple(reversed(range(len(dims)))),
        _tiles(parts.get("T", "")),
        int(parts.get("S", "(0)")[1:-1]),
        int(parts["E"][1:-1]) if "E" in parts else _default_bits(dtype),
    )  # fmt: skip


def _tuple_parts(text: str) -> list[str]:
    """The elements of the tuple shape `text`, without comments."""
    parts, at = [], _SEPARATOR.match(text, 1).end()
    while text[at] != ")":
        end = shape_end(text, at)
        if end == at:
            raise ValueError(f"no shape: {text[at : at + 100]!r}")
        parts.append(text[at:end])
        at = _SEPARATOR.match(text, end).end()
    return parts


def _tiles(text: str) -> tuple[tuple[int, ...], ...]:
    """`(8,128)(2,1)` as numbers; `*` (joined with the next minor dimension) is -1."""
    groups = text[1:-1].split(")(") if text else []
    return tuple(tuple(-1 if n == "*" else int(n) for n in g.split(",")) for g in groups)


def _default_bits(dtype: str) -> int:
    """Bits of an element where the layout says nothing: whole bytes."""
    found = re.search(r"\d+", dtype)
    return max(8, int(found[0])) if found else 8 if dtype == "pred" else 0


def leaf_range(shape: Shape | TupleShape, path: tuple[int, ...]) -> slice:
    """Which of the leaves of `shape` belong to the element at `path`."""
    start = 0
    for index in path:
        start += sum(len(element.leaves) for element in shape.elements[:index])
        shape = shape.elements[index]
    return slice(start, start + len(shape.leaves))


def alike(one: Shape, other: Shape) -> bool:
    """Whether both are the same array, wherever it lies."""
    return (one.dtype, one.dims) == (other.dtype, other.dims)
