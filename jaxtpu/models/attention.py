"""Attention with grouped queries, as a module.

Dimensions: B batch, T positions, E embed, H query heads, K key/value heads, D features of a head.
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.config import ModelConfig
from jaxtpu.kernels.attention import attention
from jaxtpu.kernels.scores import scores_of
from jaxtpu.models.linear import Linear
from jaxtpu.models.module import Module
from jaxtpu.models.norms import RMSNorm
from jaxtpu.models.rotary import Tables, rotate
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain


class Attention(Module):
    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        E, H, K, D = config.embed, config.heads, config.kv_heads, config.head_dim
        key_axes = ("embed", "kv_heads", "head_dim")
        bias = {"bias": config.text.attention_bias != "none", "rngs": rngs}
        self.query = Linear((E, H, D), ("embed", "heads", "head_dim"), precision, **bias)
        self.key = Linear((E, K, D), key_axes, precision, **bias)
        self.value = Linear((E, K, D), key_axes, precision, **bias)
        self.out = Linear(
            (H, D, E), ("heads", "head_dim", "embed"), precision, inputs=2,
            bias=config.text.attention_bias == "all", rngs=rngs,
        )  # fmt: skip
        self.qk_norm = config.text.qk_norm
        if self.qk_norm:
            self.query_norm = RMSNorm(config, precision, D)
            self.key_norm = RMSNorm(config, precision, D)
        self.config = config

    def project(self, x_BTE: jax.Array, tables: Tables | None):
        """(queries, keys, values) as attention takes them: normalised and rotated.

        Args:
          tables: of the rotary angles; None for none.
        """
        q_BTHD = constrain(self.query(x_BTE), "batch", "sequence", "heads", "head_dim")
        k_BTKD = constrain(self.key(x_BTE), "batch", "sequence", "kv_heads", "head_dim")
        v_BTKD = constrain(self.value(x_BTE), "batch", "sequence", "kv_heads", "head_dim")
        if self.qk_norm:
            q_BTHD, k_BTKD = self.query_norm(q_BTHD), self.key_norm(k_BTKD)
        turned = (lambda x: rotate(x, tables)) if tables else (lambda x: x)
        q_BTHD = checkpoint_name(turned(q_BTHD), "query")
        k_BTKD = checkpoint_name(turned(k_BTKD), "key")
        return q_BTHD, k_BTKD, checkpoint_name(v_BTKD, "value")

    def project_out(self, mixed_BTHD: jax.Array) -> jax.Array:
        """What attention made, back in the residual stream."""
        out_BTE = self.out(constrain(mixed_BTHD, "batch", "sequence", "heads", "head_dim"))
        return checkpoint_name(out_BTE, "attention_projection")

    def __call__(
        self, x_BTE: jax.Array, segment_ids_BT: jax.Array, tables: Tables | None, sliding: bool
    ) -> jax.Array:
        q_BTHD, k_BTKD, v_BTKD = self.project(x_BTE, tables)
        scores = scores_of(self.config, sliding)
        name = self.config.attention
        return self.project_out(attention(name, q_BTHD, k_BTKD, v_BTKD, segment_ids_BT, scores))
