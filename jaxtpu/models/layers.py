"""What vision models are made of: an MLP, patches, a stack of layers, a classifier.

Dimensions: B images, X and Y pixels of a side, N patches (and tokens beside them), P pixels of a
patch, C channels, E embed, F hidden features, L layers.
"""

from collections.abc import Callable

import jax
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.models.linear import Dense, Linear
from jaxtpu.models.module import Module
from jaxtpu.models.remat import scan_layers
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain


class MLP(Module):
    """Two products with a GELU (arXiv:1606.08415) between them."""

    def __init__(self, features: int, hidden: int, axes, precision: Precision, *, rngs: nnx.Rngs):
        self.up = Dense((features, hidden), axes, precision, rngs=rngs)
        self.down = Dense((hidden, features), axes[::-1], precision, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class Patches(Module):
    """An image as a row of embedded patches, [B, X, Y, C] to [B, N, E]."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.size = config.vision.patch
        pixels = self.size**2 * config.vision.channels
        self.project = Dense((pixels, config.embed), (None, "embed"), precision, rngs=rngs)

    def __call__(self, images_BXYC: jax.Array) -> jax.Array:
        B, X, Y, C = images_BXYC.shape
        P = self.size
        x = images_BXYC.reshape(B, X // P, P, Y // P, P, C).transpose(0, 1, 3, 2, 4, 5)
        return self.project(x.reshape(B, (X // P) * (Y // P), P * P * C))


class Stack(Module):
    """Layers whose parameters are stacked along a first axis, run by one scanned body.

    Args:
      make: key -> a layer, which maps [B, ...] to the same shape.
      count: how many.
    """

    def __init__(
        self,
        make: Callable[[jax.Array], Module],
        config: ModelConfig,
        *,
        count: int | None = None,
        rngs: nnx.Rngs,
    ):
        keys_L = jax.random.split(rngs.params(), config.layers if count is None else count)
        self.layers = nnx.vmap(make)(keys_L)
        for _, parameter in nnx.iter_graph(self.layers):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(axes=("layers", *parameter.axes))
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        graph, stacked = nnx.split(self.layers)
        rest = (None,) * (x.ndim - 1)

        def layer(x, params):
            return constrain(nnx.merge(graph, params)(constrain(x, "batch", *rest)), "batch", *rest)

        return scan_layers([layer], x, nnx.to_pure_dict(stacked), self.config)


def classifier(config: ModelConfig, features: int, precision: Precision, rngs: nnx.Rngs) -> Linear:
    """The last product, to a logit for each class; it starts near 0, so no class is preferred."""
    shape = (features, config.vision.classes)
    return Dense(shape, ("embed", "vocab"), precision, gain=1e-4, rngs=rngs)


def patches(config: ModelConfig) -> int:
    """Patches of an image."""
    return (config.vision.image_size // config.vision.patch) ** 2
