"""The dtype policy: which number format holds what."""

import dataclasses

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
