"""ResNet v1.5 with bottleneck blocks (arXiv:1512.03385; the stride is in the 3 x 3 convolution).

Dimensions: B images, X and Y pixels of a side, C channels.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.models.layers import classifier
from jaxtpu.models.module import Module
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain

_EXPANSION = 4  # channels that a block gives, over those inside of it


class BatchStatistic(nnx.Variable):
    """A running average of batch statistics: state of the model, not a parameter."""


class Conv(Module):
    """A convolution without bias, padded so that stride 1 keeps the size."""

    def __init__(
        self, size: int, inputs: int, outputs: int, precision: Precision, *, stride=1, rngs
    ):
        shape = (size, size, inputs, outputs)
        deviation = (2.0 / (size * size * outputs)) ** 0.5  # arXiv:1502.01852, fan-out
        kernel = jax.random.normal(rngs.params(), shape) * deviation
        axes = (None, None, "embed", "mlp")
        self.kernel = nnx.Param(kernel.astype(precision.params), axes=axes, computed=True)
        self.stride, self.padding, self.compute = stride, (size - 1) // 2, precision.compute

    def __call__(self, x_BXYC: jax.Array) -> jax.Array:
        # Gathered over fsdp by name: of a kernel divided along its inputs and its outputs, XLA's
        # partitioner makes a wrong gradient (jax 0.10.2, CPU, fsdp=2 with tensor=2 and stride 2).
        kernel = constrain(self.kernel[...].astype(self.compute), None, None, None, "mlp")
        x_BXYC = jax.lax.conv_general_dilated(
            x_BXYC.astype(self.compute),
            kernel,
            (self.stride, self.stride),
            [(self.padding, self.padding)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return constrain(x_BXYC, "batch", None, None, "mlp")


class Norm(Module):
    """Batch normalisation (arXiv:1502.03167) or group normalisation (arXiv:1803.08494), in float32.

    Batch statistics are those of all images of the step on all devices, each as often as its weight
    says, so that padding does not count: the mesh changes no result. Evaluation uses running
    averages of them (of the variance, the unbiased one).

    Args:
      scale: initial value; 0 in the last one of a block, which then starts as the identity.
    """

    def __init__(self, channels: int, config: ModelConfig, precision: Precision, scale=1.0):
        self.scale = nnx.Param(jnp.full(channels, scale, precision.params), axes=(None,))
        self.bias = nnx.Param(jnp.zeros(channels, precision.params), axes=(None,))
        self.epsilon, self.momentum = config.norm_epsilon, config.vision.momentum
        self.groups = math.gcd(config.vision.groups, channels) * (config.vision.norm == "group")
        if not self.groups:
            self.mean = BatchStatistic(jnp.zeros(channels, jnp.float32))
            self.variance = BatchStatistic(jnp.ones(channels, jnp.float32))

    def __call__(self, x_BXYC: jax.Array, training: bool, weights_B: jax.Array | None):
        x32_BXYC = x_BXYC.astype(jnp.float32)
        if self.groups:
            grouped = x32_BXYC.reshape(*x_BXYC.shape[:3], self.groups, -1)
            mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
            variance = jnp.var(grouped, axis=(1, 2, 4), keepdims=True)
            normal = (grouped - mean) * jax.lax.rsqrt(variance + self.epsilon)
            normal_BXYC = normal.reshape(x_BXYC.shape)
        else:
            mean_C, variance_C = self.mean[...], self.variance[...]
            if training:
                mean_C, variance_C = self._of_batch(x32_BXYC, weights_B)
            normal_BXYC = (x32_BXYC - mean_C) * jax.lax.rsqrt(variance_C + self.epsilon)
        scaled_BXYC = normal_BXYC * self.scale[...].astype(jnp.float32)
        return (scaled_BXYC + self.bias[...].astype(jnp.float32)).astype(x_BXYC.dtype)

    def _of_batch(self, x_BXYC: jax.Array, weights_B: jax.Array | None):
        """(mean, variance) of the batch, each [C]; the running averages take a share of them."""
        B, X, Y, _ = x_BXYC.shape
        weights_B = jnp.ones(B) if weights_B is None else weights_B
        count = jnp.maximum(jnp.sum(weights_B), 1.0) * (X * Y)
        weights_B111 = weights_B[:, None, None, None]
        mean_C = jnp.sum(x_BXYC * weights_B111, axis=(0, 1, 2)) / count
        variance_C = jnp.sum((x_BXYC - mean_C) ** 2 * weights_B111, axis=(0, 1, 2)) / count
        unbiased_C = variance_C * count / jnp.maximum(count - 1, 1.0)
        for kept, new in ((self.mean, mean_C), (self.variance, unbiased_C)):
            kept[...] = self.momentum * kept[...] + (1 - self.momentum) * new
        return mean_C, variance_C


class Block(Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, config, precision, *, rngs):
        outputs = width * _EXPANSION
        self.reduce = Conv(1, inputs, width, precision, rngs=rngs)
        self.reduce_norm = Norm(width, config, precision)
        self.conv = Conv(3, width, width, precision, stride=stride, rngs=rngs)
        self.norm = Norm(width, config, precision)
        self.expand = Conv(1, width, outputs, precision, rngs=rngs)
        self.expand_norm = Norm(outputs, config, precision, scale=0.0)
        self.projects = inputs != outputs or stride > 1
        if self.projects:
            self.shortcut = Conv(1, inputs, outputs, precision, stride=stride, rngs=rngs)
            self.shortcut_norm = Norm(outputs, config, precision)

    def __call__(self, x_BXYC: jax.Array, training: bool, weights_B) -> jax.Array:
        how = (training, weights_B)
        h_BXYC = jax.nn.relu(self.reduce_norm(self.reduce(x_BXYC), *how))
        h_BXYC = jax.nn.relu(self.norm(self.conv(h_BXYC), *how))
        h_BXYC = self.expand_norm(self.expand(h_BXYC), *how)
        if self.projects:
            x_BXYC = self.shortcut_norm(self.shortcut(x_BXYC), *how)
        return jax.nn.relu(x_BXYC + h_BXYC)


class ResNet(Module):
    """Images to logits of classes."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        vision = config.vision
        self.large = vision.stem == "imagenet"
        size, stride = (7, 2) if self.large else (3, 1)
        self.stem = Conv(size, vision.channels, vision.width, precision, stride=stride, rngs=rngs)
        self.stem_norm = Norm(vision.width, config, precision)
        channels, blocks = vision.width, []
        for stage, count in enumerate(vision.stages):
            width = vision.width * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(Block(channels, width, stride, config, precision, rngs=rngs))
                channels = width * _EXPANSION
        self.blocks = nnx.List(blocks)
        self.head = classifier(config, channels, precision, rngs)

    def __call__(self, images_BXYC: jax.Array, *, training: bool = False, weights_B=None):
        """Logits, float32 [B, classes], of images [B, X, Y, C].

        Args:
          training: batch statistics are of this batch, and the running averages take their share.
          weights_B: how often each image counts in them; once each without.
        """
        x_BXYC = jax.nn.relu(self.stem_norm(self.stem(images_BXYC), training, weights_B))
        if self.large:
            window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
            padding = ((0, 0), (1, 1), (1, 1), (0, 0))
            x_BXYC = jax.lax.reduce_window(x_BXYC, -jnp.inf, jax.lax.max, window, strides, padding)
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"blocks/{index}"):
                x_BXYC = block(x_BXYC, training, weights_B)
        return self.head(jnp.mean(x_BXYC, axis=(1, 2))).astype(jnp.float32)


def flops_per_image(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one image: 6 a weight and each position of its convolution's result."""
    del sequence_length
    vision = config.vision
    large = vision.stem == "imagenet"
    side = -(-vision.image_size // 2) if large else vision.image_size
    products = (49 if large else 9) * vision.channels * vision.width * side**2
    side = -(-side // 2) if large else side
    channels = vision.width
    for stage, count in enumerate(vision.stages):
        width = vision.width * 2**stage
        for index in range(count):
            before = side
            side = -(-side // 2) if stage and not index else side
            products += channels * width * before**2
            products += (9 * width * width + width * width * _EXPANSION) * side**2
            if channels != width * _EXPANSION:
                products += channels * width * _EXPANSION * side**2
            channels = width * _EXPANSION
    return 6.0 * (products + channels * vision.classes)
