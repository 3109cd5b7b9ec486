"""Rotary positions (arXiv:2104.09864); features i and i + D/2 form a pair, as in Llama.

Dimensions: B batch, T positions, H heads, D features of a head.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtpu.config import ModelConfig

Tables = tuple[jax.Array, jax.Array]


def rotary_tables(positions_BT: jax.Array, config: ModelConfig, sliding: bool = False) -> Tables:
    """Cosines and sines of the rotary angles, float32 [B, T, 1, D]; both features of a pair have
    its angle.

    Args:
      sliding: of the layers with sliding attention, whose angles may be others.
    """
    half = config.head_dim // 2
    local = config.text.rope_local_theta if sliding else 0.0
    frequencies = (local or config.rope_theta) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequencies = frequencies if local else _stretched(frequencies, config)
    angles_BT1D = positions_BT[..., None, None].astype(jnp.float32) * jnp.tile(frequencies, 2)
    return jnp.cos(angles_BT1D), jnp.sin(angles_BT1D)


def _stretched(frequencies: jax.Array, config: ModelConfig) -> jax.Array:
    """Angles a position, for sequences longer than the model was first trained on."""
    text = config.text
    if text.rope_type == "default":
        return frequencies
    if text.rope_type == "linear":
        return frequencies / text.rope_factor
    # Llama 3.1: long waves are stretched whole, short ones not, and those between in part.
    low, high = text.low_freq_factor, text.high_freq_factor
    turns = text.original_max_position_embeddings * frequencies / (2 * math.pi)
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)  # that is not stretched
    return (1 - share) * frequencies / text.rope_factor + share * frequencies


def rotate(x_BTHD: jax.Array, tables: Tables) -> jax.Array:
    """`x` with each pair of features turned by its angle."""
    cos_BT1D, sin_BT1D = tables
    D = x_BTHD.shape[-1]
    # On TPU, a product with a signed permutation is cheaper than moving half of each row of lanes;
    # it is exact: every sum has one term.
    swap_DD = np.roll(np.diag(np.where(np.arange(D) < D // 2, 1.0, -1.0)), D // 2, axis=1)
    other_BTHD = jnp.matmul(
        x_BTHD,
        swap_DD.astype(x_BTHD.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return (x_BTHD.astype(jnp.float32) * cos_BT1D + other_BTHD * sin_BT1D).astype(x_BTHD.dtype)
