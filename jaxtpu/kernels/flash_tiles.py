"""What the flash kernels for TPU v2 and v3 are made of: products, packing, positions, masks.

Two bfloat16 rows share a register there, the even one in its low halves. To interleave them again
takes longer than to multiply them, so the kernels leave a block's rows as they come apart, the
even ones first: attention does not mind the order of its keys, or of its queries, as long as
positions and segments have it too. Float32 rows stay in order.

Dimensions: X queries and Y keys of a block, S keys of a span (a multiple of Y), D features of a
head, L lanes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MASKED = -1e30  # not -inf: where all keys of a block are masked, the row stays finite
LOG2_E = math.log2(math.e)  # the hardware has powers of two only: scores are in units of log 2


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How attention is cut up.

    Attributes:
      block: queries, and keys, of a block.
      span: keys that lie in VMEM at a time.
      spans: of keys; together they may be longer than the sequence.
      blocks: of queries.
      pairs: whether two rows share a register (bfloat16).
      scale: of the scores.
    """

    block: int
    span: int
    spans: int
    blocks: int
    pairs: bool
    scale: float

    @property
    def seen(self) -> int:
        """Pairs of blocks that are not above the diagonal."""
        return self.blocks * (self.blocks + 1) // 2

    def when(self, condition):
        """`pl.when` of a condition on the span, which holds where there is one span: the scheduler
        then sees one piece of code, and fills the waits of its parts with one another."""
        return pl.when(condition) if self.spans > 1 else lambda run: run()

    def last_span(self, i):
        """The span that block `i` of queries has its diagonal in."""
        return jax.lax.div(i * self.block, self.span)

    def apart(self, ids_BT: jax.Array) -> jax.Array:
        """`ids_BT` in the order that the kernels have rows in."""
        if not self.pairs:
            return ids_BT
        pairs = ids_BT.reshape(ids_BT.shape[0], -1, self.block // 2, 2)
        return pairs.swapaxes(2, 3).reshape(ids_BT.shape)

    def positions(self, axis: int) -> jax.Array:
        """Positions within a block in that order, along `axis` of two."""
        shape = (self.block, 1) if axis == 0 else (1, self.block)
        at = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        if not self.pairs:
            return at
        return 2 * at - jnp.where(at >= self.block // 2, self.block - 1, 0)

    def unpack(self, packed_XD: jax.Array) -> jax.Array:
        """Rows as float32, in that order."""
        if not self.pairs:
            return packed_XD
        both = pltpu.bitcast(packed_XD, jnp.int32)
        halves = both << 16, both & -0x10000
        return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.float32) for x in halves])

    def pack(self, rows_XD: jax.Array) -> jax.Array:
        """What `unpack` undoes, rounded to the nearest even."""
        if not self.pairs:
            return rows_XD
        bits = jax.lax.bitcast_convert_type(rows_XD, jnp.int32)
        even, odd = jnp.split(bits + 0x7FFF + ((bits >> 16) & 1), 2)
        both = jax.lax.shift_right_logical(even, 16) | (odd & -0x10000)
        return pltpu.bitcast(both, jnp.bfloat16)


def product(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """A product over one axis of each, in one pass of the matrix unit, which rounds float32 to
    bfloat16 itself."""
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def masked(scores_YX, ids_YL, ids_1X, distance_YX=None):
    """Scores where query and key have one id, and the key is not later.

    Args:
      distance_YX: key position less query position; None where every key is earlier.
    """
    width = scores_YX.shape[1]
    ids_YX = jnp.tile(ids_YL, (1, width // LANES))
    mask_YX = ids_YX == ids_1X
    if distance_YX is not None:
        mask_YX &= distance_YX <= 0
    return jnp.where(mask_YX, scores_YX, MASKED)
