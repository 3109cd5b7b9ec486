"""The vision transformer (arXiv:2010.11929): patches as tokens, layers normalised before each part.

Dimensions: B images, N tokens (patches, and what stands beside them), E embed, H heads, D features
of a head.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.config import ModelConfig
from jaxtpu.models.layers import MLP, Patches, Stack, classifier, patches
from jaxtpu.models.linear import Dense, normal
from jaxtpu.models.module import Module
from jaxtpu.models.norms import LayerNorm
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain

_DEVIATION = 0.02  # of the initial positions and tokens, as in the paper's code


class Attention(Module):
    """Every token attends to every token."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        shape = (config.embed, config.heads, config.head_dim)
        axes = ("embed", "heads", "head_dim")
        self.query = Dense(shape, axes, precision, rngs=rngs)
        self.key = Dense(shape, axes, precision, rngs=rngs)
        self.value = Dense(shape, axes, precision, rngs=rngs)
        back = (*shape[1:], config.embed)
        self.out = Dense(back, ("heads", "head_dim", "embed"), precision, inputs=2, rngs=rngs)

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        q, k, v = (
            checkpoint_name(constrain(part(x_BNE), "batch", None, "heads", "head_dim"), name)
            for part, name in ((self.query, "query"), (self.key, "key"), (self.value, "value"))
        )
        mixed_BNHD = checkpoint_name(jax.nn.dot_product_attention(q, k, v), "attention_out")
        return checkpoint_name(self.out(mixed_BNHD), "attention_projection")


class Layer(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config, precision)
        self.attention = Attention(config, precision, rngs=rngs)
        self.mlp_norm = LayerNorm(config, precision)
        self.mlp = MLP(config.embed, config.mlp, ("embed", "mlp"), precision, rngs=rngs)

    def __call__(self, x_BNE: jax.Array) -> jax.Array:
        x_BNE += self.attention(self.attention_norm(x_BNE))
        return x_BNE + self.mlp(self.mlp_norm(x_BNE))


class ViT(Module):
    """Images to logits of classes."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        vision, E = config.vision, config.embed
        self.patches = Patches(config, precision, rngs=rngs)
        self.has_class_token, self.num_patches = vision.pool == "cls", patches(config)
        tokens = vision.registers + self.has_class_token
        if tokens:  # the class token first, then the registers (arXiv:2309.16588)
            made = normal(rngs, (tokens, E), _DEVIATION, precision)
            self.tokens = nnx.Param(made, axes=(None, "embed"))
        self.learned = vision.positions == "learned"
        if self.learned:  # of the class token and the patches; registers have none
            placed = self.has_class_token + self.num_patches
            made = normal(rngs, (placed, E), _DEVIATION, precision)
            self.positions = nnx.Param(made, axes=(None, "embed"))
        self.encoder = Stack(
            lambda key: Layer(config, precision, rngs=nnx.Rngs(params=key)), config, rngs=rngs
        )
        self.final_norm = LayerNorm(config, precision)
        self.head = classifier(config, E, precision, rngs)

    def __call__(self, images_BXYC: jax.Array, *, training: bool = False, weights_B=None):
        """Logits, float32 [B, classes], of images [B, X, Y, C].

        `training` and `weights_B`, how often each image counts, change nothing here.
        """
        del training, weights_B
        x_BNE = self.patches(images_BXYC)
        B, N, E = x_BNE.shape
        placed = self.positions[...] if self.learned else sincos_positions(N, E)
        placed = placed.astype(x_BNE.dtype)
        x_BNE += placed[-N:]
        if hasattr(self, "tokens"):
            tokens_NE = self.tokens[...].astype(x_BNE.dtype)
            if self.has_class_token and self.learned:
                tokens_NE = tokens_NE.at[0].add(placed[0])
            beside_BNE = jnp.broadcast_to(tokens_NE, (B, *tokens_NE.shape))
            x_BNE = jnp.concatenate([beside_BNE, x_BNE], axis=1)
        x_BNE = self.final_norm(self.encoder(x_BNE))
        pooled_BE = x_BNE[:, 0] if self.has_class_token else jnp.mean(x_BNE[:, -N:], axis=1)
        return self.head(pooled_BE).astype(jnp.float32)


def sincos_positions(count: int, features: int) -> np.ndarray:
    """Fixed positions of a square of patches, float32 [count, features]: sines and cosines of the
    row in one half of the features, of the column in the other (arXiv:2104.02057)."""
    side, quarter = round(count**0.5), features // 4
    frequencies = 10_000.0 ** (-np.arange(quarter) / quarter)
    rows, columns = (
        axis.reshape(-1, 1) * frequencies
        for axis in np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    )
    parts = [np.sin(columns), np.cos(columns), np.sin(rows), np.cos(rows)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def flops_per_image(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one image: 6 a weight and token that it meets, 12 N H D for each token's
    attention (PaLM, arXiv:2204.02311, appendix B)."""
    del sequence_length
    vision, E = config.vision, config.embed
    N = patches(config) + vision.registers + (vision.pool == "cls")
    layer = 4 * E * config.heads * config.head_dim + 2 * E * config.mlp
    embedding = vision.patch**2 * vision.channels * E
    weights = config.layers * layer * N + embedding * patches(config) + E * vision.classes
    return 6.0 * weights + 12.0 * config.layers * config.heads * config.head_dim * N * N
