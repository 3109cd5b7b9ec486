"""The forward kernel of flash attention for TPU v2 and v3.

Dimensions: as in `flash_tiles.py`; B batch, H query heads, K key/value heads, T positions, J blocks
of a span.

Scores are held keys by queries [Y, X]: the maximum and the sum of a row are then [1, X], a few
registers, and reduced without crossing lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtpu.kernels.flash_tiles import LANES, LOG2_E, MASKED, Tiling, masked, product


def forward(
    tiling: Tiling,
    interpret: bool,
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTD: jax.Array,
    ids_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(output [B, H, T, D], log-sum-exp [B, H, 1, T] in units of log 2 and the kernels' order)."""
    B, H, T, D = q_BHTD.shape
    group = H // k_BKTD.shape[1]
    block, span = tiling.block, tiling.span

    # The span of the diagonal comes first, the earlier ones after it.
    def at_span(i, c):
        return jnp.maximum(tiling.last_span(i) - c, 0)

    queries = pl.BlockSpec((None, None, block, D), lambda b, h, i, c: (b, h, i, 0))
    keys = pl.BlockSpec(
        (None, None, span, D), lambda b, h, i, c: (b, jax.lax.div(h, group), at_span(i, c), 0)
    )
    ids_1X = pl.BlockSpec((None, 1, block), lambda b, h, i, c: (b, 0, i))
    ids_SL = pl.BlockSpec((None, span, LANES), lambda b, h, i, c: (b, at_span(i, c), 0))
    row = pl.BlockSpec((None, None, 1, block), lambda b, h, i, c: (b, h, 0, i))
    ids_BT = tiling.apart(ids_BT)
    size, lanes = q_BHTD.dtype.itemsize, D + -D % LANES  # the matrix unit has its width
    return pl.pallas_call(
        functools.partial(_kernel, tiling, group),
        grid=(B, H, tiling.blocks, tiling.spans),
        in_specs=[queries, keys, keys, ids_1X, ids_SL],
        out_specs=[queries, row],
        out_shape=[
            jax.ShapeDtypeStruct(q_BHTD.shape, q_BHTD.dtype),
            jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((span // block, block, D), jnp.float32),
            pltpu.VMEM((span // block, D, block), jnp.float32),
            pltpu.VMEM((block, D), jnp.float32),
            pltpu.VMEM((block, block), jnp.float32),
            pltpu.VMEM((D, block), jnp.float32),
            pltpu.VMEM((1, block), jnp.float32),
            pltpu.VMEM((1, block), jnp.float32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=2 * 2 * B * H * tiling.seen * block**2 * lanes,
            transcendentals=B * H * tiling.seen * block**2,
            bytes_accessed=(q_BHTD.size * 2 + (k_BKTD.size + v_BKTD.size)) * size,
        ),
        interpret=interpret,
        name="flash_forward",
    )(
        q_BHTD, k_BKTD, v_BKTD, ids_BT[:, None],
        jnp.broadcast_to(ids_BT[:, :, None], (*ids_BT.shape, LANES)),
    )  # fmt: skip


def _kernel(
    tiling, group, q_ref, k_ref, v_ref, ids_1X_ref, ids_SL_ref, out_ref, lse_ref,
    k_JYD_ref, v_JDY_ref, q_XD_ref, scores_YX_ref, sum_DX_ref, max_1X_ref, total_1X_ref,
):  # fmt: skip
    i, c = pl.program_id(2), pl.program_id(3)
    block = tiling.block
    diagonal = tiling.last_span(i)
    first_key = (diagonal - c) * tiling.span
    fresh = c <= diagonal
    if tiling.spans == 1:  # then keys and values stay as they are for all queries of a key head
        fresh = (i == 0) & (jax.lax.rem(pl.program_id(1), group) == 0)
    parts = [slice(at, at + LANES) for at in range(0, block, LANES)]

    def rows(j):
        return pl.ds(pl.multiple_of(j * block, block), block)

    def score(j, cols, distance_YX=None):
        """Scores of a part of the queries with block `j` of keys."""
        scores_YX = product(k_JYD_ref[j], q_XD_ref[cols, :], 1, 1)
        ids_YL, ids_1X = ids_SL_ref[rows(j), :], ids_1X_ref[:, cols]
        scores_YX_ref[:, cols] = masked(scores_YX, ids_YL, ids_1X, distance_YX)

    def mix(j, cols):
        """Adds block `j` of values, by the online softmax (arXiv:1805.02867) of its scores."""
        scores_YX, old_1X = scores_YX_ref[:, cols], max_1X_ref[:, cols]
        max_1X = jnp.maximum(old_1X, scores_YX.max(axis=0, keepdims=True))
        weights_YX, shrink_1X = jnp.exp2(scores_YX - max_1X), jnp.exp2(old_1X - max_1X)
        total_1X = weights_YX.sum(axis=0, keepdims=True)
        mixed_DX = product(v_JDY_ref[j], weights_YX, 1, 0)
        max_1X_ref[:, cols] = max_1X
        total_1X_ref[:, cols] = total_1X_ref[:, cols] * shrink_1X + total_1X
        sum_DX_ref[:, cols] = sum_DX_ref[:, cols] * shrink_1X + mixed_DX

    @pl.when(fresh)
    def _():
        def unpack(j, _):
            k_JYD_ref[j] = tiling.unpack(k_ref[rows(j), :])
            v_JDY_ref[j] = tiling.unpack(v_ref[rows(j), :]).T

        jax.lax.fori_loop(0, tiling.span // block, unpack, None)

    @tiling.when(c == 0)
    def _():
        q_XD_ref[...] = tiling.unpack(q_ref[...]) * (tiling.scale * LOG2_E)
        max_1X_ref[...] = jnp.full_like(max_1X_ref, MASKED)
        total_1X_ref[...] = jnp.zeros_like(total_1X_ref)
        sum_DX_ref[...] = jnp.zeros_like(sum_DX_ref)

    @tiling.when(c <= diagonal)
    def _():
        last = jax.lax.div(jnp.minimum(i * block - first_key, tiling.span - block), block)
        distance_YX = first_key + (last - i) * block + tiling.positions(0) - tiling.positions(1)
        for cols in parts:
            score(last, cols, distance_YX[:, cols])

        def step(n, _):
            # One part's scores for the next block keep the matrix units busy during the softmax
            # of another part.
            for cols in parts:
                mix(last - n, cols)
                score(last - n - 1, cols)

        jax.lax.fori_loop(0, last, step, None)
        for cols in parts:
            mix(0, cols)

    @tiling.when(c == tiling.spans - 1)
    def _():
        total_1X = total_1X_ref[...]
        lse_ref[...] = max_1X_ref[...] + jnp.log2(total_1X)
        out_ref[...] = tiling.pack((sum_DX_ref[...] * (1 / total_1X)).T)
