"""Products with weights."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.models.module import Module
from jaxtpu.precision import Precision


def normal(rngs: nnx.Rngs, shape, deviation: float, precision: Precision) -> jax.Array:
    """Of one seed, the same numbers in every number format, rounded."""
    return (jax.random.normal(rngs.params(), shape) * deviation).astype(precision.params)


def padded(array: jax.Array, shape) -> jax.Array:
    """`array` with zeros up to `shape`."""
    return jnp.pad(array, [(0, n - size) for n, size in zip(shape, array.shape, strict=True)])


class Linear(Module):
    """A product over the first `inputs` dimensions of the kernel; the bias starts at 0.

    Args:
      shape, axes: of the kernel, with the logical name of each dimension.
      gain: of the variance of the initial kernel, over one by its inputs.
      padded_to: shape of the kernel that is held; what is beyond `shape` is 0.
    """

    def __init__(
        self,
        shape,
        axes,
        precision: Precision,
        *,
        inputs: int = 1,
        bias: bool = False,
        gain: float = 1.0,
        padded_to=None,
        rngs: nnx.Rngs,
    ):
        held = padded_to or shape
        deviation = gain**0.5 * math.prod(shape[:inputs]) ** -0.5
        kernel = normal(rngs, shape, deviation, precision)
        kernel = padded(kernel, held) if padded_to else kernel
        self.kernel = nnx.Param(kernel, axes=axes, computed=True)
        self.has_bias = bias
        if bias:
            zeros = jnp.zeros(held[inputs:], precision.params)
            self.bias = nnx.Param(zeros, axes=axes[inputs:], computed=True)
        self.inputs, self.compute = inputs, precision.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(self.compute)
        product = jnp.tensordot(x.astype(self.compute), kernel, self.inputs)
        return product + self.bias[...].astype(self.compute) if self.has_bias else product


Dense = functools.partial(Linear, bias=True)
