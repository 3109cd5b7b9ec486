"""MLP-Mixer (arXiv:2105.01601): one MLP over the patches, one over the features, by turns.

Dimensions: B images, N patches, E embed.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.models.layers import MLP, Patches, Stack, classifier, patches
from jaxtpu.models.module import Module
from jaxtpu.models.norms import LayerNorm
from jaxtpu.precision import Precision


class Layer(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        N, hidden = patches(config), config.vision.token_mlp
        self.token_norm = LayerNorm(config, precision)
        self.token_mlp = MLP(N, hidden, ("embed", "mlp"), precision, rngs=rngs)
        self.mlp_norm = LayerNorm(config, precision)
        self.mlp = MLP(config.embed, config.mlp, ("embed", "mlp"), precision, rngs=rngs)

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        mixed_BEN = self.token_mlp(self.token_norm(x_BNE).swapaxes(1, 2))
        x_BNE += mixed_BEN.swapaxes(1, 2)
        return x_BNE + self.mlp(self.mlp_norm(x_BNE))


class Mixer(Module):
    """Images to logits of classes."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.patches = Patches(config, precision, rngs=rngs)
        self.mixer = Stack(
            lambda key: Layer(config, precision, rngs=nnx.Rngs(params=key)), config, rngs=rngs
        )
        self.final_norm = LayerNorm(config, precision)
        self.head = classifier(config, config.embed, precision, rngs)

    def __call__(self, images_BXYC: jax.Array, *, training: bool = False, weights_B=None):
        """Logits, float32 [B, classes], of images [B, X, Y, C]; see `ViT`."""
        del training, weights_B
        x_BNE = self.final_norm(self.mixer(self.patches(images_BXYC)))
        return self.head(jnp.mean(x_BNE, axis=1)).astype(jnp.float32)


def flops_per_image(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one image: 6 a weight and each vector that it meets."""
    del sequence_length
    vision, E, N = config.vision, config.embed, patches(config)
    layer = 2 * N * vision.token_mlp * E + 2 * E * config.mlp * N
    embedding = vision.patch**2 * vision.channels * E * N
    return 6.0 * (config.layers * layer + embedding + E * vision.classes)
