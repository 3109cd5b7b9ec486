"""A decoder-only transformer: Llama by default; GPT-2, Mistral, Qwen and Gemma by `model.text`.

Dimensions: B batch, T positions, E embed, H query heads, K key/value heads, D features of a head,
V vocabulary (padded), L layers.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtpu.config import ModelConfig
from jaxtpu.config.text import layer_pattern
from jaxtpu.kernels.cross_entropy import logits_of
from jaxtpu.models.blocks import Layer
from jaxtpu.models.linear import Linear, normal
from jaxtpu.models.module import Module, scoped
from jaxtpu.models.norms import make_norm
from jaxtpu.models.remat import scan_layers
from jaxtpu.models.rotary import Tables, rotary_tables
from jaxtpu.models.sizes import padded_vocabulary
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain


class Decoder(Module):
    """L layers whose parameters are stacked along a first axis, run by one scanned body: a layer,
    or as many as until their kinds repeat."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        keys_L = jax.random.split(rngs.params(), config.layers)
        make = nnx.vmap(lambda key: Layer(config, precision, rngs=nnx.Rngs(params=key)))
        self.layers = make(keys_L)
        for _, parameter in nnx.iter_graph(self.layers):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(axes=("layers", *parameter.axes))
        self.normalised = config.text.norm_placement != "post"
        if self.normalised:
            self.final_norm = make_norm(config, precision)
        self.config = config

    def tables(self, positions_BT: jax.Array) -> dict[bool, Tables | None]:
        """Of the layers with sliding attention (True) and of the others, where there are such."""
        kinds, text = sorted(set(layer_pattern(self.config))), self.config.text
        if text.position_embedding != "rope":
            return dict.fromkeys(kinds)
        if not text.rope_local_theta:
            return dict.fromkeys(kinds, rotary_tables(positions_BT, self.config))
        return {kind: rotary_tables(positions_BT, self.config, kind) for kind in kinds}

    def __call__(self, x_BTE, segment_ids_BT, positions_BT) -> jax.Array:
        graph, stacked = nnx.split(self.layers)
        tables = self.tables(positions_BT)  # once for all layers

        def layer(sliding: bool):
            return lambda x_BTE, params: nnx.merge(graph, params)(
                x_BTE, segment_ids_BT, tables[sliding], sliding
            )

        layers = [layer(sliding) for sliding in layer_pattern(self.config)]
        x_BTE = scan_layers(layers, x_BTE, nnx.to_pure_dict(stacked), self.config)
        return self.final_norm(x_BTE) if self.normalised else x_BTE


class Embedding(Module):
    """Of token ids."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        shape = (padded_vocabulary(config), config.embed)
        table_VE = normal(rngs, shape, config.init_std, precision)
        # A tied table has two gradients, which are added in its own number format.
        computed = not config.tied_embeddings
        self.table = nnx.Param(table_VE, axes=("vocab", "embed"), computed=computed)
        self.compute = precision.compute
        self.factor = config.embed**0.5 if config.text.scale_embeddings else 1.0

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        x_BTE = self.table[...].astype(self.compute)[ids_BT]
        return x_BTE if self.factor == 1.0 else x_BTE * jnp.asarray(self.factor, x_BTE.dtype)


class Learned(Module):
    """A learned vector for each of `rows` positions, or other ids; undivided along those."""

    def __init__(self, rows: int, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        table = normal(rngs, (rows, config.embed), config.init_std, precision)
        self.table = nnx.Param(table, axes=(None, "embed"), computed=True)
        self.compute = precision.compute

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        return self.table[...].astype(self.compute)[ids_BT]


class Transformer(Module):
    """Token ids to next-token logits."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.embedding = Embedding(config, precision, rngs=rngs)
        self.learned = config.text.position_embedding == "learned"
        if self.learned:
            rows = config.text.max_position_embeddings
            self.positions = Learned(rows, config, precision, rngs=rngs)
        self.decoder = Decoder(config, precision, rngs=rngs)
        if not config.tied_embeddings:
            shape = (config.embed, padded_vocabulary(config))
            self.head = Linear(shape, ("embed", "vocab"), precision, rngs=rngs)
        self.tied, self.vocab_size = config.tied_embeddings, config.vocab_size
        self.soft_cap = config.text.final_logit_softcapping

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Logits, float32 [B, T, V]; ids that only pad the vocabulary have no probability.

        Args:
          batch: `inputs`, `segment_ids` and `positions`, each int32 [B, T].
        """
        x_BTE, head_EV = self.features_and_head(batch)
        logits_BTV = logits_of(x_BTE, head_EV, self.vocab_size, self.soft_cap)
        return constrain(logits_BTV, "batch", "sequence", "vocab")

    @scoped
    def features_and_head(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """What the logits are a product of, before any cap: [B, T, E], and weights [E, V]."""
        x_BTE = self.embed(batch["inputs"], batch["positions"])
        return self.decoder(x_BTE, batch["segment_ids"], batch["positions"]), self.head_EV()

    def embed(self, ids_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """The residual stream before the first layer."""
        x_BTE = constrain(self.embedding(ids_BT), "batch", "residual", "embed")
        return x_BTE + self.positions(positions_BT) if self.learned else x_BTE

    def head_EV(self) -> jax.Array:
        """The output projection, as it is computed with."""
        if self.tied:
            return self.embedding.table[...].astype(self.embedding.compute).T
        return self.head.kernel[...].astype(self.head.compute)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs to train on one token, without recomputation: 6 a matrix weight that it meets, and
    12 H D T a layer for attention over the whole sequence (PaLM, arXiv:2204.02311, appendix B: no
    discount for the causal half), or over the window where that is shorter."""
    E, H, K, D = config.embed, config.heads, config.kv_heads, config.head_dim
    matrices = 3 if config.text.gated_mlp else 2
    layer = E * H * D * 2 + E * K * D * 2 + matrices * E * config.mlp
    weights = config.layers * layer + E * padded_vocabulary(config)
    pattern, window = layer_pattern(config), config.text.sliding_window or sequence_length
    seen = {True: min(window, sequence_length), False: sequence_length}
    length = sum(seen[pattern[i % len(pattern)]] for i in range(config.layers))
    return 6.0 * weights + 12.0 * H * D * length
