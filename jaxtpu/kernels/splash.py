"""JAX's Pallas kernel for TPU v4 and later, splash attention, behind our interface.

Dimensions: B batch, T positions, H query heads, K key/value heads, D features of a head. The
kernel takes one example, head by head; it divides nothing by sqrt(D).
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from jaxtpu.kernels.placement import place
from jaxtpu.kernels.scores import CAUSAL, Scores

_LANES = 128  # of a vector register: the least block, and what head sizes are padded to
_BLOCK = 512


def splash_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    interpret: bool = False,
    scores: Scores = CAUSAL,
) -> jax.Array:
    """As `xla_attention`. The output and its log-sum-exp both have the name `attention_out` for
    checkpoint policies: the kernel takes one name only.

    Args:
      interpret: run the kernel step by step in XLA, on any device.
    """
    placement, k_BTKD, v_BTKD = place(q_BTHD, k_BTKD, v_BTKD)
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    block = block_size(T, _BLOCK)

    def local(q_BTHD, k_BTKD, v_BTKD, segment_ids_BT):
        scaled_BTHD = (q_BTHD.astype(jnp.float32) * scores.scale(D)).astype(q_BTHD.dtype)
        heads_first = (_heads_first(x, block) for x in (scaled_BTHD, k_BTKD, v_BTKD))
        # Padding comes last, so causality alone hides it from every real query.
        padding = 0 if scores.causal else -1
        ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (0, -T % block)), constant_values=padding)
        kernel = _kernel(q_BTHD.shape[2], T + -T % block, block, interpret, scores)
        out_BHTD = jax.vmap(kernel)(*heads_first, splash.SegmentIds(ids_BT, ids_BT))
        return out_BHTD.swapaxes(1, 2)[:, :T, :, :D]

    run = placement.on_each_device(local, "BTHD BTKD BTKD BT", "BTHD")
    return run(q_BTHD, k_BTKD, v_BTKD, segment_ids_BT)


def block_size(length: int, most: int) -> int:
    """The block, up to `most`, that pads `length` the least; the largest of several such."""
    sizes = [most // 2**k for k in range(most.bit_length()) if most // 2**k >= _LANES]
    return min(sizes, key=lambda size: -length % size)


def _mask(length: int, scores: Scores):
    shape, before = (length, length), scores.window - 1
    if scores.window:
        return splash.LocalMask(shape, (before, 0 if scores.causal else before), offset=0)
    return splash.CausalMask(shape) if scores.causal else splash.FullMask(shape)


def _kernel(heads: int, length: int, block: int, interpret: bool, scores: Scores):
    mask = splash.MultiHeadMask([_mask(length, scores)] * heads)
    blocks = splash.BlockSizes(*(block,) * 8)
    return splash.make_splash_mha(
        mask,
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention_out",
        attn_logits_soft_cap=scores.soft_cap or None,
        interpret=interpret,
    )


def _heads_first(x_BTHD: jax.Array, block: int) -> jax.Array:
    """[B, H, T, D], with T padded to a multiple of `block` and an odd D to whole lanes."""
    _, T, _, D = x_BTHD.shape
    lanes = 0 if D % (_LANES // 2) == 0 else -D % _LANES
    return jnp.pad(x_BTHD, ((0, 0), (0, -T % block), (0, 0), (0, lanes))).swapaxes(1, 2)
