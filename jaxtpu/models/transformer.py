"""A decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU.

Dimensions: B batch, T positions, E embed, H query heads, K key/value heads, D features of a head,
F hidden features of the MLP, V vocabulary (padded), L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.kernels.attention import attention
from jaxtpu.models.module import Module
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain

_MASKED = -1e30
_REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def padded_vocabulary(config: ModelConfig) -> int:
    """The vocabulary rounded up to `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


class Linear(Module):
    """A product over the first `inputs` dimensions of the kernel, without bias."""

    def __init__(self, shape, axes, precision: Precision, *, inputs: int = 1, rngs: nnx.Rngs):
        fan_in = 1
        for size in shape[:inputs]:
            fan_in *= size
        kernel = jax.random.normal(rngs.params(), shape, precision.params) * fan_in**-0.5
        self.kernel = nnx.Param(kernel, axes=axes)
        self.inputs, self.compute = inputs, precision.compute

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(self.compute)
        return jnp.tensordot(x, kernel, self.inputs)


class RMSNorm(Module):
    """Root mean square normalisation (arXiv:1910.07467), computed in float32."""

    def __init__(self, config: ModelConfig, precision: Precision):
        # Undivided: gathering so few bytes at each use would cost more than holding them.
        self.scale = nnx.Param(jnp.ones(config.embed, precision.params), axes=(None,))
        self.epsilon = config.norm_epsilon

    def __call__(self, x_BTE: jax.Array) -> jax.Array:
        x32_BTE = x_BTE.astype(jnp.float32)
        mean_square = jnp.mean(x32_BTE * x32_BTE, axis=-1, keepdims=True)
        normal_BTE = x32_BTE * jax.lax.rsqrt(mean_square + self.epsilon)
        return (normal_BTE * self.scale[...].astype(jnp.float32)).astype(x_BTE.dtype)


def rotate(x_BTHD: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (arXiv:2104.09864); features i and i + D/2 form a pair, as in Llama."""
    half = x_BTHD.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_BT1D = positions_BT[..., None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles_BT1D), jnp.cos(angles_BT1D)
    first, second = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHD.dtype)


class Attention(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        E, H, K, D = config.embed, config.heads, config.kv_heads, config.head_dim
        key_axes = ("embed", "kv_heads", "head_dim")
        self.query = Linear((E, H, D), ("embed", "heads", "head_dim"), precision, rngs=rngs)
        self.key = Linear((E, K, D), key_axes, precision, rngs=rngs)
        self.value = Linear((E, K, D), key_axes, precision, rngs=rngs)
        self.out = Linear((H, D, E), ("heads", "head_dim", "embed"), precision, inputs=2, rngs=rngs)
        self.theta, self.implementation = config.rope_theta, config.attention

    def __call__(self, x_BTE, segment_ids_BT, positions_BT) -> jax.Array:
        q_BTHD = constrain(self.query(x_BTE), "batch", "sequence", "heads", "head_dim")
        k_BTKD = constrain(self.key(x_BTE), "batch", "sequence", "kv_heads", "head_dim")
        v_BTKD = constrain(self.value(x_BTE), "batch", "sequence", "kv_heads", "head_dim")
        q_BTHD = rotate(q_BTHD, positions_BT, self.theta)
        k_BTKD = rotate(k_BTKD, positions_BT, self.theta)
        mixed_BTHD = attention(self.implementation, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT)
        return self.out(constrain(mixed_BTHD, "batch", "sequence", "heads", "head_dim"))


class MLP(Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        E, F = config.embed, config.mlp
        self.gate = Linear((E, F), ("embed", "mlp"), precision, rngs=rngs)
        self.up = Linear((E, F), ("embed", "mlp"), precision, rngs=rngs)
        self.down = Linear((F, E), ("mlp", "embed"), precision, rngs=rngs)

    def __call__(self, x_BTE: jax.Array) -> jax.Array:
        hidden_BTF = jax.nn.silu(self.gate(x_BTE)) * self.up(x_BTE)
        return self.down(constrain(hidden_BTF, "batch", "sequence", "mlp"))


class Layer(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, precision)
        self.attention = Attention(config, precision, rngs=rngs)
        self.mlp_norm = RMSNorm(config, precision)
        self.mlp = MLP(config, precision, rngs=rngs)

    def __call__(self, x_BTE, segment_ids_BT, positions_BT) -> jax.Array:
        x_BTE = constrain(x_BTE, "batch", "sequence", "embed")
        x_BTE += self.attention(self.attention_norm(x_BTE), segment_ids_BT, positions_BT)
        x_BTE += self.mlp(self.mlp_norm(x_BTE))
        return constrain(x_BTE, "batch", "sequence", "embed")


class Decoder(Module):
    """L layers whose parameters are stacked along a first axis, run by one scanned body."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        keys_L = jax.random.split(rngs.params(), config.layers)
        make = nnx.vmap(lambda key: Layer(config, precision, rngs=nnx.Rngs(params=key)))
        self.layers = make(keys_L)
        for _, parameter in nnx.iter_graph(self.layers):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(axes=("layers", *parameter.axes))
        self.final_norm = RMSNorm(config, precision)
        self.remat = config.remat

    def __call__(self, x_BTE, segment_ids_BT, positions_BT) -> jax.Array:
        graph, stacked = nnx.split(self.layers)

        def body(x_BTE, layer_params):
            layer = nnx.merge(graph, layer_params)
            return layer(x_BTE, segment_ids_BT, positions_BT), None

        if self.remat != "none":
            # Within a scan the compiler cannot merge the two copies, so the barrier is not needed.
            body = jax.checkpoint(body, policy=_REMAT[self.remat], prevent_cse=False)
        x_BTE, _ = jax.lax.scan(body, x_BTE, nnx.to_pure_dict(stacked))
        return self.final_norm(x_BTE)


class Embedding(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        shape = (padded_vocabulary(config), config.embed)
        table_VE = jax.random.normal(rngs.params(), shape, precision.params) * config.init_std
        self.table = nnx.Param(table_VE, axes=("vocab", "embed"))
        self.compute = precision.compute

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        return self.table[...].astype(self.compute)[ids_BT]

    def logits(self, x_BTE: jax.Array) -> jax.Array:
        return x_BTE @ self.table[...].astype(self.compute).T


class Transformer(Module):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.embedding = Embedding(config, precision, rngs=rngs)
        self.decoder = Decoder(config, precision, rngs=rngs)
        if not config.tied_embeddings:
            shape = (config.embed, padded_vocabulary(config))
            self.head = Linear(shape, ("embed", "vocab"), precision, rngs=rngs)
        self.tied, self.vocab_size = config.tied_embeddings, config.vocab_size

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Logits, float32 [B, T, V]; ids that only pad the vocabulary have no probability.

        Args:
          batch: `inputs`, `segment_ids` and `positions`, each int32 [B, T].
        """
        x_BTE = constrain(self.embedding(batch["inputs"]), "batch", "sequence", "embed")
        x_BTE = self.decoder(x_BTE, batch["segment_ids"], batch["positions"])
        logits_BTV = self.embedding.logits(x_BTE) if self.tied else self.head(x_BTE)
        logits_BTV = constrain(logits_BTV, "batch", "sequence", "vocab").astype(jnp.float32)
        is_id_V = jnp.arange(logits_BTV.shape[-1]) < self.vocab_size
        return jnp.where(is_id_V, logits_BTV, _MASKED)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one token, without recomputation: 6 a matrix weight, and 12 L H D T for
    attention over the whole sequence (PaLM, arXiv:2204.02311, appendix B: no discount for the
    causal half)."""
    E, H, K, D = config.embed, config.heads, config.kv_heads, config.head_dim
    layer = E * H * D * 2 + E * K * D * 2 + 3 * E * config.mlp
    weights = config.layers * layer + E * padded_vocabulary(config)
    return 6.0 * weights + 12.0 * config.layers * H * D * sequence_length
