"""The forward kernel of flash attention for TPU v2 and v3.

Dimensions: as in `flash_tiles.py`; B batch, H query heads, K key/value heads, T positions.
Scores are held keys by queries [Y, X]: the maximum and the sum of a row are then [1, X], a few
registers, and reduced without crossing lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtpu.kernels.flash_tiles import LANES, LOG2_E, Tiling, masked, product


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
        functools.partial(_kernel, tiling),
        grid=(B, H, tiling.blocks, tiling.spans),
        in_specs=[queries, keys, keys, ids_1X, ids_SL],
        out_specs=[queries, row],
        out_shape=[
            jax.ShapeDtypeStruct(q_BHTD.shape, q_BHTD.dtype),
            jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((block, D), jnp.float32),
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
    tiling, q_ref, k_ref, v_ref, ids_1X_ref, ids_SL_ref,
    out_ref, lse_ref, q_XD_ref, sum_DX_ref, max_1X_ref, total_1X_ref,
):  # fmt: skip
    i, c = pl.program_id(2), pl.program_id(3)
    block = tiling.block
    diagonal = tiling.last_span(i)
    first_key = (diagonal - c) * tiling.span
    before = jax.lax.div(jnp.clip(i * block - first_key, 0, tiling.span), block)

    def attend(j, first=False):
        """The online softmax over block `j` of keys; the first one is that of the diagonal."""
        rows = pl.ds(pl.multiple_of(j * block, block), block)
        k_YD, v_YD = tiling.unpack(k_ref[rows, :]), tiling.unpack(v_ref[rows, :])
        distance_YX = tiling.positions(0) - tiling.positions(1) if first else None
        parts = [slice(at, at + LANES) for at in range(0, block, LANES)]
        held = []
        for cols in parts:
            scores_YX = product(k_YD, q_XD_ref[cols, :], 1, 1)
            far = None if distance_YX is None else distance_YX[:, cols]
            held.append(masked(scores_YX, ids_SL_ref[rows, :], ids_1X_ref[:, cols], far))
        for cols, scores_YX in zip(parts, held, strict=True):
            max_1X = scores_YX.max(axis=0, keepdims=True)
            if not first:
                max_1X = jnp.maximum(max_1X_ref[:, cols], max_1X)
            weights_YX = jnp.exp2(scores_YX - max_1X)
            total_1X = weights_YX.sum(axis=0, keepdims=True)
            mixed_DX = product(v_YD, weights_YX, 0, 0)
            if not first:
                shrink_1X = jnp.exp2(max_1X_ref[:, cols] - max_1X)
                total_1X += total_1X_ref[:, cols] * shrink_1X
                mixed_DX += sum_DX_ref[:, cols] * shrink_1X
            max_1X_ref[:, cols] = max_1X
            total_1X_ref[:, cols] = total_1X
            sum_DX_ref[:, cols] = mixed_DX

    @pl.when(c == 0)
    def _():
        q_XD_ref[...] = tiling.unpack(q_ref[...]) * (tiling.scale * LOG2_E)
        attend(before, first=True)

    @pl.when(c <= diagonal)
    def _():
        jax.lax.fori_loop(0, before, lambda j, _: attend(j), None)

    @pl.when(c == tiling.spans - 1)
    def _():
        total_1X = total_1X_ref[...]
        lse_ref[...] = max_1X_ref[...] + jnp.log2(total_1X)
        out_ref[...] = tiling.pack((sum_DX_ref[...] * (1 / total_1X)).T)
