"""Flash attention (arXiv:2205.14135) for TPU v2 and v3, as Pallas kernels of our own.

JAX's kernels do not compile there: the matrix unit takes no bfloat16 operands from Mosaic. These
read bfloat16 from HBM and multiply float32, in one pass: the unit rounds to bfloat16 itself.

Cycles of one head of 2048 positions and 128 features on v3, counted in the compiler's schedule
(libtpu 0.0.42.1; the matrix units alone would need 16.4 and 41.0 thousand for the causal half):

    blocks of   forward   backward
    256          37,500     65,600
    512          33,600     63,500
    1024                    the backward kernel does not fit VMEM

Dimensions: B batch, T positions, H query heads, K key/value heads, D features of a head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.hardware import GENERATIONS
from jaxtpu.kernels.flash_backward import backward
from jaxtpu.kernels.flash_forward import forward
from jaxtpu.kernels.flash_tiles import LANES, Tiling
from jaxtpu.kernels.placement import Placement, place
from jaxtpu.kernels.scores import CAUSAL, Scores

_BLOCK = 512
_VMEM = min(GENERATIONS[name].vmem_bytes for name in ("v2", "v3"))


def flash_attention(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    interpret: bool = False,
    tiling: Tiling | None = None,
    scores: Scores = CAUSAL,
) -> jax.Array:
    """As `xla_attention`, but for what is `Scores.special`.

    Args:
      interpret: run the kernels step by step in XLA, on any device.
      tiling: if not that of `make_tiling`.
    """
    placement, k_BTKD, v_BTKD = place(q_BTHD, k_BTKD, v_BTKD)
    tiling = tiling or make_tiling(q_BTHD.shape[1], q_BTHD.shape[3], q_BTHD.dtype)
    assert not scores.special, scores
    if scores.scalar:
        tiling = dataclasses.replace(tiling, scale=scores.scale(q_BTHD.shape[3]))
    return _attention(placement, interpret, tiling, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(placement, interpret, tiling, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT):
    saved = _forward(placement, interpret, tiling, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT)
    return saved[0]


def _forward(placement: Placement, interpret, tiling, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT):
    def local(q_BTHD, k_BTKD, v_BTKD, ids_BT):
        T, D = q_BTHD.shape[1], q_BTHD.shape[3]
        q, k, v = _heads_first(tiling, (q_BTHD,), (k_BTKD, v_BTKD))
        out_BHTD, lse_BH1T = forward(tiling, interpret, q, k, v, _padded(tiling, ids_BT))
        return out_BHTD.swapaxes(1, 2)[:, :T, :, :D], lse_BH1T

    run = placement.on_each_device(local, "BTHD BTKD BTKD BT", "BTHD BH1T")
    out_BTHD, lse_BH1T = run(q_BTHD, k_BTKD, v_BTKD, segment_ids_BT)
    out_BTHD = checkpoint_name(out_BTHD, "attention_out")
    lse_BH1T = checkpoint_name(lse_BH1T, "attention_lse")
    return out_BTHD, (q_BTHD, k_BTKD, v_BTKD, segment_ids_BT, out_BTHD, lse_BH1T)


def _backward(placement: Placement, interpret, tiling, saved, d_out_BTHD):
    def local(q_BTHD, k_BTKD, v_BTKD, ids_BT, out_BTHD, lse_BH1T, d_out_BTHD):
        T, D = q_BTHD.shape[1], q_BTHD.shape[3]
        of_queries, of_keys = (q_BTHD, out_BTHD, d_out_BTHD), (k_BTKD, v_BTKD)
        q, out, d_out, k, v = _heads_first(tiling, of_queries, of_keys)
        ids_BT = _padded(tiling, ids_BT)
        gradients = backward(tiling, interpret, q, k, v, ids_BT, out, lse_BH1T, d_out)
        return tuple(x_BHTD.swapaxes(1, 2)[:, :T, :, :D] for x_BHTD in gradients)

    run = placement.on_each_device(local, "BTHD BTKD BTKD BT BTHD BH1T BTHD", "BTHD BTKD BTKD")
    return *run(*saved, d_out_BTHD), None


_attention.defvjp(_forward, _backward)


def make_tiling(
    length: int, features: int, dtype: jnp.dtype, block: int = _BLOCK, vmem_bytes: int = _VMEM
) -> Tiling:
    """The tiling of `length` positions: blocks of up to `block` that pad the least, and the longest
    spans of keys that the backward kernel has room for in `vmem_bytes`.

    Args:
      features: of a head.
    """
    size, lanes = jnp.dtype(dtype).itemsize, features + -features % LANES
    sizes = [block // 2**k for k in range(block.bit_length()) if block // 2**k >= LANES]
    block = min(sizes, key=lambda size: -length % size)
    padded = length + -length % block
    # Twice, as they are fetched and written ahead: keys, values, their gradients, and segments.
    # Once: the gradients' sums. Beside them, blocks of scores and of what belongs to queries.
    of_a_key = 2 * (4 * lanes * size + LANES * 4) + 2 * lanes * 4
    of_a_block = 5 * block**2 * 4 + block * lanes * (2 * 4 * size + 3 * 4)
    most = max(block, (vmem_bytes - of_a_block) // of_a_key)
    blocks = padded // block
    spans = -(-blocks // (most // block))
    span = -(-blocks // spans) * block
    return Tiling(block, span, spans, blocks, size == 2, features**-0.5)


def _padded(tiling: Tiling, ids_BT: jax.Array) -> jax.Array:
    """Padding comes last, so causality alone hides it from every real query."""
    length = max(tiling.blocks * tiling.block, tiling.spans * tiling.span)
    return jnp.pad(ids_BT, ((0, 0), (0, length - ids_BT.shape[1])))


def _heads_first(
    tiling: Tiling, of_queries: tuple[jax.Array, ...], of_keys: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Each [B, T, H, D] as [B, H, T, D], T padded to whole blocks or spans, an odd D to lanes."""

    def one(x_BTHD: jax.Array, length: int) -> jax.Array:
        _, T, _, D = x_BTHD.shape
        lanes = 0 if D % (LANES // 2) == 0 else -D % LANES
        return jnp.pad(x_BTHD, ((0, 0), (0, length - T), (0, 0), (0, lanes))).swapaxes(1, 2)

    return (
        *(one(x, tiling.blocks * tiling.block) for x in of_queries),
        *(one(x, tiling.spans * tiling.span) for x in of_keys),
    )
