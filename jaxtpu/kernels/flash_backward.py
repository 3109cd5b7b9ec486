"""The backward kernel of flash attention for TPU v2 and v3: all three gradients in one pass.

Dimensions: as in `flash_tiles.py`; B batch, H query heads, K key/value heads, T positions. A span
of keys stays in VMEM with its gradients while all queries that see it go by.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxtpu.kernels.flash_tiles import LANES, LOG2_E, Tiling, masked, product


def backward(
    tiling: Tiling,
    interpret: bool,
    q_BHTD: jax.Array,
    k_BKTD: jax.Array,
    v_BKTD: jax.Array,
    ids_BT: jax.Array,
    out_BHTD: jax.Array,
    lse_BH1T: jax.Array,
    d_out_BHTD: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the queries, keys and values."""
    B, H, T, D = q_BHTD.shape
    group = H // k_BKTD.shape[1]
    block, span, blocks = tiling.block, tiling.span, tiling.blocks

    def head_and_block(k, n):
        return k * group + jax.lax.div(n, blocks), jax.lax.rem(n, blocks)

    def query_index(b, k, c, n):
        h, i = head_and_block(k, n)
        return b, h, i, 0

    def row_index(b, k, c, n):
        h, i = head_and_block(k, n)
        return b, h, 0, i

    queries = pl.BlockSpec((None, None, block, D), query_index)
    row = pl.BlockSpec((None, None, 1, block), row_index)
    keys = pl.BlockSpec((None, None, span, D), lambda b, k, c, n: (b, k, c, 0))
    ids_1X = pl.BlockSpec((None, 1, block), lambda b, k, c, n: (b, 0, jax.lax.rem(n, blocks)))
    ids_SL = pl.BlockSpec((None, span, LANES), lambda b, k, c, n: (b, c, 0))
    d_queries = pl.BlockSpec(
        (None, None, None, block, D), lambda b, k, c, n: (c, *query_index(b, k, c, n))
    )
    ids_BT = tiling.apart(ids_BT)
    size, lanes = q_BHTD.dtype.itemsize, D + -D % LANES  # the matrix unit has its width
    dq_CBHTD, dk_BKTD, dv_BKTD = pl.pallas_call(
        functools.partial(_kernel, tiling),
        grid=(B, H // group, tiling.spans, group * blocks),
        in_specs=[queries, keys, keys, ids_1X, ids_SL, queries, row, queries],
        out_specs=[d_queries, keys, keys],
        out_shape=[
            jax.ShapeDtypeStruct((tiling.spans, *q_BHTD.shape), q_BHTD.dtype),
            jax.ShapeDtypeStruct(k_BKTD.shape, k_BKTD.dtype),
            jax.ShapeDtypeStruct(v_BKTD.shape, v_BKTD.dtype),
        ],
        scratch_shapes=[
            pltpu.VMEM((block, D), jnp.float32),
            pltpu.VMEM((block, D), jnp.float32),
            pltpu.VMEM((1, block), jnp.float32),
            pltpu.VMEM((D, block), jnp.float32),
            pltpu.VMEM((span, D), jnp.float32),
            pltpu.VMEM((span, D), jnp.float32),
        ],
        cost_estimate=pl.CostEstimate(
            flops=5 * 2 * B * H * tiling.seen * block**2 * lanes,
            transcendentals=B * H * tiling.seen * block**2,
            bytes_accessed=size
            * (q_BHTD.size * (3 + tiling.spans) + 2 * (k_BKTD.size + v_BKTD.size)),
        ),
        interpret=interpret,
        name="flash_backward",
    )(
        q_BHTD, k_BKTD, v_BKTD, ids_BT[:, None],
        jnp.broadcast_to(ids_BT[:, :, None], (*ids_BT.shape, LANES)), out_BHTD, lse_BH1T, d_out_BHTD,
    )  # fmt: skip
    return dq_CBHTD.sum(0, dtype=jnp.float32).astype(q_BHTD.dtype), dk_BKTD, dv_BKTD


def _kernel(
    tiling, q_ref, k_ref, v_ref, ids_1X_ref, ids_SL_ref, out_ref, lse_ref, d_out_ref,
    dq_ref, dk_ref, dv_ref,
    q_XD_ref, d_out_XD_ref, delta_1X_ref, dq_DX_ref, dk_SD_ref, dv_SD_ref,
):  # fmt: skip
    c, n = pl.program_id(2), pl.program_id(3)
    block = tiling.block
    i = jax.lax.rem(n, tiling.blocks)
    before = jax.lax.div(jnp.clip(i * block - c * tiling.span, 0, tiling.span), block)
    diagonal = tiling.last_span(i)

    def add(j, causal=False):
        """Adds what block `j` of keys gives to the gradients."""
        rows = pl.ds(pl.multiple_of(j * block, block), block)
        k_YD, v_YD = tiling.unpack(k_ref[rows, :]), tiling.unpack(v_ref[rows, :])
        q_XD, d_out_XD = q_XD_ref[...], d_out_XD_ref[...]
        distance_YX = tiling.positions(0) - tiling.positions(1) if causal else None
        scores_YX = product(k_YD, q_XD, 1, 1)
        scores_YX = masked(scores_YX, ids_SL_ref[rows, :], ids_1X_ref[...], distance_YX)
        d_weights_YX = product(v_YD, d_out_XD, 1, 1)
        weights_YX = jnp.exp2(scores_YX - lse_ref[...])
        d_scores_YX = weights_YX * (d_weights_YX - delta_1X_ref[...])
        dv_SD_ref[rows, :] += product(weights_YX, d_out_XD, 1, 0)
        dk_SD_ref[rows, :] += product(d_scores_YX, q_XD, 1, 0)
        dq_DX_ref[...] += product(k_YD, d_scores_YX, 0, 0)

    @pl.when(n == 0)
    def _():
        dk_SD_ref[...] = jnp.zeros_like(dk_SD_ref)
        dv_SD_ref[...] = jnp.zeros_like(dv_SD_ref)

    dq_DX_ref[...] = jnp.zeros_like(dq_DX_ref)

    @tiling.when(c <= diagonal)
    def _():
        q_XD_ref[...] = tiling.unpack(q_ref[...]) * (tiling.scale * LOG2_E)
        d_out_XD_ref[...] = d_out_XD = tiling.unpack(d_out_ref[...])
        # Of each row, the sum over keys of weight x its gradient (arXiv:2205.14135, B.4).
        delta_1X_ref[...] = (tiling.unpack(out_ref[...]) * d_out_XD).T.sum(axis=0, keepdims=True)
        jax.lax.fori_loop(0, before, lambda j, _: add(j), None)

    @tiling.when(c == diagonal)
    def _():
        add(before, causal=True)

    dq_ref[...] = tiling.pack((dq_DX_ref[...] * tiling.scale).T)

    @pl.when(n == pl.num_programs(3) - 1)
    def _():
        for at in range(0, tiling.span, block):
            rows = slice(at, at + block)
            dk_ref[rows, :] = tiling.pack(dk_SD_ref[rows, :] * (1 / LOG2_E))
            dv_ref[rows, :] = tiling.pack(dv_SD_ref[rows, :])
