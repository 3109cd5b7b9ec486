"""A plain MLP: the pixels of an image through fully connected layers of one width."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.models.layers import Stack, classifier
from jaxtpu.models.linear import Dense
from jaxtpu.models.module import Module
from jaxtpu.precision import Precision

_GAIN = 2.0  # a ReLU halves the mean square (arXiv:1502.01852)


def pixels(config: ModelConfig) -> int:
    """Numbers in an image."""
    return config.vision.image_size**2 * config.vision.channels


class Layer(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        shape = (config.embed, config.embed)
        self.dense = Dense(shape, ("embed", "mlp"), precision, gain=_GAIN, rngs=rngs)

    def __call__(self, x_BE: jax.Array) -> jax.Array:
        return jax.nn.relu(self.dense(x_BE))


class MLP(Module):
    """Images to logits of classes."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        shape = (pixels(config), config.embed)
        self.first = Dense(shape, ("mlp", "embed"), precision, gain=_GAIN, rngs=rngs)
        self.has_hidden = config.layers > 1
        if self.has_hidden:
            self.hidden = Stack(
                lambda key: Layer(config, precision, rngs=nnx.Rngs(params=key)),
                config, count=config.layers - 1, rngs=rngs,
            )  # fmt: skip
        self.head = classifier(config, config.embed, precision, rngs)

    def __call__(self, images_BXYC: jax.Array, *, training: bool = False, weights_B=None):
        """Logits, float32 [B, classes], of images [B, X, Y, C]; see `ViT`."""
        del training, weights_B
        x_BE = jax.nn.relu(self.first(images_BXYC.reshape(len(images_BXYC), -1)))
        if self.has_hidden:
            x_BE = self.hidden(x_BE)
        return self.head(x_BE).astype(jnp.float32)


def flops_per_image(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one image: 6 a weight."""
    del sequence_length
    E = config.embed
    return 6.0 * (pixels(config) * E + (config.layers - 1) * E * E + E * config.vision.classes)
