"""The dtype policy: which number format holds what."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtpu.config import PrecisionConfig


@dataclasses.dataclass(frozen=True)
class Precision:
    """Softmax, norms and the loss are float32 whatever the policy says.

    Attributes:
      params: parameters and optimizer state.
      compute: activations and matrix products.
      accumulate: gradients summed over microbatches.
    """

    params: DTypeLike
    compute: DTypeLike
    accumulate: DTypeLike


def make_precision(config: PrecisionConfig) -> Precision:
    return Precision(
        *(jnp.dtype(name) for name in (config.params, config.compute, config.accumulate))
    )


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 to bfloat16, up or down with probabilities that make the mean `x` (arXiv:1502.02551).

    An update much smaller than a parameter's last place is then taken now and then, not never.
    """
    # bfloat16 is the upper half of float32: what is added to the lower half carries with the
    # probability that the lower half is of the last place.
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
