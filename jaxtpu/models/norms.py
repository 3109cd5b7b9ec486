"""Normalisation of the last dimension, in float32.

Scales are undivided: gathering so few bytes at each use would cost more than holding them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.models.module import Module
from jaxtpu.precision import Precision


class RMSNorm(Module):
    """Root-mean-square normalisation (arXiv:1910.07467).

    Args:
      size: features; None for those of the residual stream.
    """

    def __init__(self, config: ModelConfig, precision: Precision, size: int | None = None):
        self.plus_one = config.text.norm == "rmsnorm_plus_one"
        made = (jnp.zeros if self.plus_one else jnp.ones)(size or config.embed, precision.params)
        self.scale = nnx.Param(made, axes=(None,))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        normal = x32 * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (normal * (1 + scale if self.plus_one else scale)).astype(x.dtype)


class LayerNorm(Module):
    """Layer normalisation (arXiv:1607.06450).

    Args:
      size: features; None for those of the residual stream.
    """

    def __init__(self, config: ModelConfig, precision: Precision, size: int | None = None):
        size = size or config.embed
        self.scale = nnx.Param(jnp.ones(size, precision.params), axes=(None,))
        self.bias = nnx.Param(jnp.zeros(size, precision.params), axes=(None,))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scaled = normal * self.scale[...].astype(jnp.float32)
        return (scaled + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def make_norm(config: ModelConfig, precision: Precision) -> RMSNorm | LayerNorm:
    """The one that `model.text.norm` names."""
    return (LayerNorm if config.text.norm == "layernorm" else RMSNorm)(config, precision)
