"""Attention by blocks, in XLA: the online softmax (arXiv:1805.02867, arXiv:2205.14135).

Memory is linear in the sequence, forward and backward: one block of scores is held at a time, and
the backward pass computes it again from the log-sum-exp of each row. Blocks of which no query sees a
key (above the diagonal, or beyond the window) are left out.

Dimensions: B batch, T positions, K key heads, G query heads of a key head, D features of a head;
N blocks of X queries, M blocks of Y keys. Accumulators are float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.kernels.placement import repeat_undivided, sequence_parts
from jaxtpu.kernels.scores import CAUSAL, Scores
from jaxtpu.sharding import active_rules, constrain

MASKED = -1e30  # not -inf: where all keys of a block are masked, the row stays finite
_BLOCK = 512  # scores of a block are 1 MiB a head


def blockwise_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    block: int = _BLOCK,
    scores: Scores = CAUSAL,
) -> jax.Array:
    """As `xla_attention`.

    Args:
      block: most positions of a block of queries and of one of keys. Where the mesh divides the
        sequence, all queries are one block: each device has its part of them, and every key.
    """
    B, T, H, D = q_BTHD.shape
    k_BTKD, v_BTKD = repeat_undivided(k_BTKD, v_BTKD, H)
    K = k_BTKD.shape[2]
    divided = sequence_parts(active_rules()) > 1
    if divided:
        heads = "kv_heads" if K < H else "heads"
        k_BTKD = constrain(k_BTKD, "batch", None, heads, None)
        v_BTKD = constrain(v_BTKD, "batch", None, heads, None)
        segment_ids_BT = constrain(segment_ids_BT, "batch", None)
    blocks = Blocks(T if divided else min(block, T), min(block, T), T, scores)
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    return _attention(blocks, q_BTKGD, k_BTKD, v_BTKD, segment_ids_BT).reshape(q_BTHD.shape)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Positions of a block of queries, of a block of keys, and of the sequence; and what the
    scores between them become."""

    queries: int
    keys: int
    length: int
    scores: Scores = CAUSAL

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """(query blocks, key blocks) between which something is seen, by query block."""
        first_key = np.arange(-(-self.length // self.keys))[None, :] * self.keys
        last_query = np.arange(1, -(-self.length // self.queries) + 1)[:, None] * self.queries
        causal, window = self.scores.causal, self.scores.window
        seen = first_key < last_query if causal else first_key < self.length
        if window:
            seen = seen & (last_query - self.queries - (first_key + self.keys - 1) < window)
        if window and not causal:
            seen = seen & (first_key - (last_query - 1) < window)
        i, j = np.nonzero(np.broadcast_to(seen, (len(last_query), first_key.shape[1])))
        return i.astype(np.int32), j.astype(np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(blocks, q_BTKGD, k_BTKD, v_BTKD, segment_ids_BT):
    return _forward(blocks, q_BTKGD, k_BTKD, v_BTKD, segment_ids_BT)[0]


def _forward(blocks, q_BTKGD, k_BTKD, v_BTKD, segment_ids_BT):
    """((output, what the backward pass needs))."""
    B, _, K, G, D = q_BTKGD.shape
    q_NBXKGD = _split(q_BTKGD, blocks.queries)
    k_MBYKD, v_MBYKD = _split(k_BTKD, blocks.keys), _split(v_BTKD, blocks.keys)
    rows = (len(q_NBXKGD), B, K, G, blocks.queries)

    def step(carry, pair):
        i, j = pair
        sum_NBKGXD, max_NBKGX, total_NBKGX = carry
        scores_BKGXY = _scores(blocks, q_NBXKGD[i], k_MBYKD[j], segment_ids_BT, i, j)
        max_BKGX = jnp.maximum(max_NBKGX[i], scores_BKGXY.max(-1))
        weights_BKGXY = jnp.exp(scores_BKGXY - max_BKGX[..., None])
        shrink_BKGX = jnp.exp(max_NBKGX[i] - max_BKGX)
        mixed_BKGXD = _product("BKGXY,BYKD->BKGXD", weights_BKGXY, v_MBYKD[j])
        sum_BKGXD = sum_NBKGXD[i] * shrink_BKGX[..., None] + mixed_BKGXD
        total_BKGX = total_NBKGX[i] * shrink_BKGX + weights_BKGXY.sum(-1)
        carry = sum_NBKGXD.at[i].set(sum_BKGXD), max_NBKGX.at[i].set(max_BKGX)
        return (*carry, total_NBKGX.at[i].set(total_BKGX)), None

    start = jnp.zeros((*rows, D)), jnp.full(rows, MASKED), jnp.zeros(rows)
    (sum_NBKGXD, max_NBKGX, total_NBKGX), _ = jax.lax.scan(step, start, blocks.pairs)
    out_NBXKGD = jnp.moveaxis(sum_NBKGXD / total_NBKGX[..., None], 4, 2)
    out_BTKGD = _join(out_NBXKGD.astype(v_BTKD.dtype), blocks.length)
    out_BTKGD = checkpoint_name(out_BTKGD, "attention_out")
    lse_NBKGX = checkpoint_name(max_NBKGX + jnp.log(total_NBKGX), "attention_lse")
    return out_BTKGD, (q_BTKGD, k_BTKD, v_BTKD, segment_ids_BT, out_BTKGD, lse_NBKGX)


def _backward(blocks, saved, d_out_BTKGD):
    q_BTKGD, k_BTKD, v_BTKD, segment_ids_BT, out_BTKGD, lse_NBKGX = saved
    scale, cap = blocks.scores.scale(q_BTKGD.shape[-1]), blocks.scores.soft_cap
    q_NBXKGD, d_out_NBXKGD = _split(q_BTKGD, blocks.queries), _split(d_out_BTKGD, blocks.queries)
    k_MBYKD, v_MBYKD = _split(k_BTKD, blocks.keys), _split(v_BTKD, blocks.keys)
    # Of each row, the sum over keys of weight x its gradient (arXiv:2205.14135, appendix B.4).
    delta_BTKG = jnp.sum(d_out_BTKGD.astype(jnp.float32) * out_BTKGD.astype(jnp.float32), -1)
    delta_NBKGX = jnp.moveaxis(_split(delta_BTKG, blocks.queries), 2, 4)

    def step(carry, pair):
        i, j = pair
        dq_NBXKGD, dk_MBYKD, dv_MBYKD = carry
        scores_BKGXY = _scores(blocks, q_NBXKGD[i], k_MBYKD[j], segment_ids_BT, i, j)
        weights_BKGXY = jnp.exp(scores_BKGXY - lse_NBKGX[i][..., None])
        d_weights_BKGXY = _product("BXKGD,BYKD->BKGXY", d_out_NBXKGD[i], v_MBYKD[j])
        d_scores_BKGXY = weights_BKGXY * (d_weights_BKGXY - delta_NBKGX[i][..., None]) * scale
        if cap:  # the slope of tanh; what is masked has none
            d_scores_BKGXY *= 1 - jnp.square(jnp.maximum(scores_BKGXY, -cap) / cap)
        dq_BXKGD = _product("BKGXY,BYKD->BXKGD", d_scores_BKGXY, k_MBYKD[j])
        dk_BYKD = _product("BKGXY,BXKGD->BYKD", d_scores_BKGXY, q_NBXKGD[i])
        dv_BYKD = _product("BKGXY,BXKGD->BYKD", weights_BKGXY, d_out_NBXKGD[i])
        carry = dq_NBXKGD.at[i].add(dq_BXKGD), dk_MBYKD.at[j].add(dk_BYKD)
        return (*carry, dv_MBYKD.at[j].add(dv_BYKD)), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_NBXKGD, k_MBYKD, v_MBYKD))
    (dq_NBXKGD, dk_MBYKD, dv_MBYKD), _ = jax.lax.scan(step, start, blocks.pairs)
    dq_BTKGD = _join(dq_NBXKGD.astype(q_BTKGD.dtype), blocks.length)
    dk_BTKD = _join(dk_MBYKD.astype(k_BTKD.dtype), blocks.length)
    return dq_BTKGD, dk_BTKD, _join(dv_MBYKD.astype(v_BTKD.dtype), blocks.length), None


_attention.defvjp(_forward, _backward)


def _scores(blocks, q_BXKGD, k_BYKD, segment_ids_BT, i, j) -> jax.Array:
    """Scores of query block `i` with key block `j`, masked, float32 [B, K, G, X, Y]."""
    scale = blocks.scores.scale(q_BXKGD.shape[-1])
    scores_BKGXY = _product("BXKGD,BYKD->BKGXY", q_BXKGD, k_BYKD) * scale
    scores_BKGXY = blocks.scores.capped(scores_BKGXY)
    at_X = i * blocks.queries + jnp.arange(blocks.queries)
    at_Y = j * blocks.keys + jnp.arange(blocks.keys)
    # Padding comes last, so causality alone hides it from every real query.
    segments_BX = jnp.take(segment_ids_BT, at_X, axis=1, mode="clip")
    segments_BY = jnp.take(segment_ids_BT, at_Y, axis=1, mode="clip")
    mask_BXY = segments_BX[:, :, None] == segments_BY[:, None, :]
    mask_BXY &= blocks.scores.sees(at_X[:, None], at_Y)
    if not blocks.scores.causal:
        mask_BXY &= at_Y < blocks.length
    return jnp.where(mask_BXY[:, None, None], scores_BKGXY, MASKED)


def _product(dimensions: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """A product in the number format of `right`, accumulated in float32."""
    return jnp.einsum(
        dimensions, left.astype(right.dtype), right, preferred_element_type=jnp.float32
    )


def _split(x_BT: jax.Array, block: int) -> jax.Array:
    """[B, T, ...] as blocks [N, B, block, ...], padded with zeros."""
    B, T, *rest = x_BT.shape
    number = -(-T // block)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, number * block - T), *[(0, 0) for _ in rest]])
    return jnp.moveaxis(x_BT.reshape(B, number, block, *rest), 1, 0)


def _join(x_NBX: jax.Array, length: int) -> jax.Array:
    """Blocks [N, B, block, ...] as [B, T, ...], without the padding."""
    N, B, X, *rest = x_NBX.shape
    return jnp.moveaxis(x_NBX, 0, 1).reshape(B, N * X, *rest)[:, :length]
