"""A decoder-only transformer: RMSNorm, rotary positions, grouped queries, SwiGLU.

Dimensions: B batch, T positions, E embed, H query heads, K key/value heads, D features of a head,
F hidden features of the MLP, V vocabulary (padded), L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.config import ModelConfig
from jaxtpu.kernels.attention import attention
from jaxtpu.kernels.cross_entropy import logits_of
from jaxtpu.models.module import Module, scoped
from jaxtpu.models.remat import scan_layers
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain


def padded_vocabulary(config: ModelConfig) -> int:
    """The vocabulary rounded up to `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def padded_mlp(config: ModelConfig) -> int:
    """Hidden features of the MLP, rounded up to `mlp_multiple`."""
    return -(-config.mlp // config.mlp_multiple) * config.mlp_multiple


def _normal(rngs: nnx.Rngs, shape, deviation: float, precision: Precision) -> jax.Array:
    """Of one seed, the same numbers in every number format, rounded."""
    return (jax.random.normal(rngs.params(), shape) * deviation).astype(precision.params)


class Linear(Module):
    """A product over the first `inputs` dimensions of the kernel, without bias.

    Args:
      padded_to: shape of the kernel that is held; what is beyond `shape` is 0.
    """

    def __init__(
        self, shape, axes, precision: Precision, *, inputs: int = 1, padded_to=None, rngs: nnx.Rngs
    ):
        fan_in = 1
        for size in shape[:inputs]:
            fan_in *= size
        kernel = _normal(rngs, shape, fan_in**-0.5, precision)
        if padded_to is not None:
            kernel = jnp.pad(
                kernel, [(0, n - size) for n, size in zip(padded_to, shape, strict=True)]
            )
        self.kernel = nnx.Param(kernel, axes=axes, computed=True)
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


def rotary_tables(positions_BT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, float32 [B, T, 1, D]; both features of a pair have
    its angle."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_BT1D = positions_BT[..., None, None].astype(jnp.float32) * jnp.tile(frequencies, 2)
    return jnp.cos(angles_BT1D), jnp.sin(angles_BT1D)


def rotate(x_BTHD: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary positions (arXiv:2104.09864); features i and i + D/2 form a pair, as in Llama."""
    cos_BT1D, sin_BT1D = tables
    D = x_BTHD.shape[-1]
    # On TPU, a product with a signed permutation is cheaper than moving half of each row of lanes;
    # it is exact: every sum has one term.
    swap_DD = np.roll(np.diag(np.where(np.arange(D) < D // 2, 1.0, -1.0)), D // 2, axis=1)
    other_BTHD = jnp.matmul(
        x_BTHD,
        swap_DD.astype(x_BTHD.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    return (x_BTHD.astype(jnp.float32) * cos_BT1D + other_BTHD * sin_BT1D).astype(x_BTHD.dtype)


class Attention(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        E, H, K, D = config.embed, config.heads, config.kv_heads, config.head_dim
        key_axes = ("embed", "kv_heads", "head_dim")
        self.query = Linear((E, H, D), ("embed", "heads", "head_dim"), precision, rngs=rngs)
        self.key = Linear((E, K, D), key_axes, precision, rngs=rngs)
        self.value = Linear((E, K, D), key_axes, precision, rngs=rngs)
        self.out = Linear((H, D, E), ("heads", "head_dim", "embed"), precision, inputs=2, rngs=rngs)
        self.implementation = config.attention

    def __call__(self, x_BTE, segment_ids_BT, tables) -> jax.Array:
        q_BTHD = constrain(self.query(x_BTE), "batch", "sequence", "heads", "head_dim")
        k_BTKD = constrain(self.key(x_BTE), "batch", "sequence", "kv_heads", "head_dim")
        v_BTKD = constrain(self.value(x_BTE), "batch", "sequence", "kv_heads", "head_dim")
        q_BTHD = checkpoint_name(rotate(q_BTHD, tables), "query")
        k_BTKD = checkpoint_name(rotate(k_BTKD, tables), "key")
        v_BTKD = checkpoint_name(v_BTKD, "value")
        mixed_BTHD = attention(self.implementation, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT)
        out_BTE = self.out(constrain(mixed_BTHD, "batch", "sequence", "heads", "head_dim"))
        return checkpoint_name(out_BTE, "attention_projection")


class MLP(Module):
    """SwiGLU (arXiv:2002.05202).

    Features that only fill F up to `mlp_multiple` are 0 and have no gradient: silu(0) * 0, and the
    rows of `down` that they meet are 0 as well.
    """

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        E, F, padded = config.embed, config.mlp, padded_mlp(config)
        wide = {"precision": precision, "padded_to": (E, padded), "rngs": rngs}
        self.gate = Linear((E, F), ("embed", "mlp"), **wide)
        self.up = Linear((E, F), ("embed", "mlp"), **wide)
        self.down = Linear((F, E), ("mlp", "embed"), precision, padded_to=(padded, E), rngs=rngs)

    def __call__(self, x_BTE: jax.Array) -> jax.Array:
        gate_BTF = checkpoint_name(self.gate(x_BTE), "mlp_gate")
        up_BTF = checkpoint_name(self.up(x_BTE), "mlp_up")
        hidden_BTF = checkpoint_name(jax.nn.silu(gate_BTF) * up_BTF, "mlp_hidden")
        return self.down(constrain(hidden_BTF, "batch", "sequence", "mlp"))


class Layer(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, precision)
        self.attention = Attention(config, precision, rngs=rngs)
        self.mlp_norm = RMSNorm(config, precision)
        self.mlp = MLP(config, precision, rngs=rngs)

    def __call__(self, x_BTE, segment_ids_BT, tables) -> jax.Array:
        x_BTE = constrain(x_BTE, "batch", "residual", "embed")
        x_BTE += self.attention(self.attention_norm(x_BTE), segment_ids_BT, tables)
        x_BTE += self.mlp(self.mlp_norm(x_BTE))
        return constrain(x_BTE, "batch", "residual", "embed")


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
        self.config = config

    def __call__(self, x_BTE, segment_ids_BT, positions_BT) -> jax.Array:
        graph, stacked = nnx.split(self.layers)
        tables = rotary_tables(positions_BT, self.config)  # once for all layers

        def layer(x_BTE, params):
            return nnx.merge(graph, params)(x_BTE, segment_ids_BT, tables)

        return self.final_norm(scan_layers(layer, x_BTE, nnx.to_pure_dict(stacked), self.config))


class Embedding(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        shape = (padded_vocabulary(config), config.embed)
        table_VE = _normal(rngs, shape, config.init_std, precision)
        # A tied table has two gradients, which are added in its own number format.
        computed = not config.tied_embeddings
        self.table = nnx.Param(table_VE, axes=("vocab", "embed"), computed=computed)
        self.compute = precision.compute

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        return self.table[...].astype(self.compute)[ids_BT]


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
        logits_BTV = logits_of(*self.features_and_head(batch), self.vocab_size)
        return constrain(logits_BTV, "batch", "sequence", "vocab")

    @scoped
    def features_and_head(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """What the logits are a product of: [B, T, E], and weights [E, V]."""
        x_BTE = constrain(self.embedding(batch["inputs"]), "batch", "residual", "embed")
        x_BTE = self.decoder(x_BTE, batch["segment_ids"], batch["positions"])
        if self.tied:
            return x_BTE, self.embedding.table[...].astype(self.embedding.compute).T
        return x_BTE, self.head.kernel[...].astype(self.head.compute)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one token, without recomputation: 6 a matrix weight, and 12 L H D T for
    attention over the whole sequence (PaLM, arXiv:2204.02311, appendix B: no discount for the
    causal half)."""
    E, H, K, D = config.embed, config.heads, config.kv_heads, config.head_dim
    layer = E * H * D * 2 + E * K * D * 2 + 3 * E * config.mlp
    weights = config.layers * layer + E * padded_vocabulary(config)
    return 6.0 * weights + 12.0 * config.layers * H * D * sequence_length
