"""The layer of a transformer, and its MLP.

Dimensions: B batch, T positions, E embed, F hidden features of the MLP.
"""

import functools

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.config import ModelConfig
from jaxtpu.models.attention import Attention
from jaxtpu.models.linear import Linear
from jaxtpu.models.module import Module
from jaxtpu.models.norms import make_norm
from jaxtpu.models.sizes import padded_mlp
from jaxtpu.precision import Precision
from jaxtpu.sharding import constrain

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class MLP(Module):
    """Gated (arXiv:2002.05202), or not: activation(gate) * up, or activation(up); then down.

    Features that only fill F up to `mlp_multiple` are 0 and have no gradient: every activation of 0
    is 0, and the rows of `down` that they meet are 0 as well.

    Args:
      hidden: features F; None for those of the config, padded.
    """

    def __init__(
        self, config: ModelConfig, precision: Precision, *, hidden: int | None = None,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        E, F = config.embed, hidden or config.mlp
        padded = hidden or padded_mlp(config)
        wide = {"precision": precision, "padded_to": (E, padded), "rngs": rngs}
        wide["bias"] = bias = config.text.mlp_bias
        self.gated = config.text.gated_mlp
        if self.gated:
            self.gate = Linear((E, F), ("embed", "mlp"), **wide)
        self.up = Linear((E, F), ("embed", "mlp"), **wide)
        self.down = Linear(
            (F, E), ("mlp", "embed"), precision, padded_to=(padded, E), bias=bias, rngs=rngs
        )
        self.activation = ACTIVATIONS[config.text.hidden_act]

    def __call__(self, x_BTE: jax.Array) -> jax.Array:
        if self.gated:
            gate_BTF = checkpoint_name(self.gate(x_BTE), "mlp_gate")
            up_BTF = checkpoint_name(self.up(x_BTE), "mlp_up")
            hidden_BTF = self.activation(gate_BTF) * up_BTF
        else:
            hidden_BTF = self.activation(checkpoint_name(self.up(x_BTE), "mlp_up"))
        hidden_BTF = checkpoint_name(hidden_BTF, "mlp_hidden")
        return self.down(constrain(hidden_BTF, "batch", "sequence", "mlp"))


class Layer(Module):
    """Attention and the MLP, normalised where `model.text.norm_placement` says."""

    def __init__(self, config: ModelConfig, precision: Precision, *, rngs: nnx.Rngs):
        self.placement = config.text.norm_placement
        self.attention_norm = make_norm(config, precision)
        self.attention = Attention(config, precision, rngs=rngs)
        self.mlp_norm = make_norm(config, precision)
        self.mlp = MLP(config, precision, rngs=rngs)
        if self.placement == "pre_post":
            self.attention_post_norm = make_norm(config, precision)
            self.mlp_post_norm = make_norm(config, precision)

    def __call__(self, x_BTE, segment_ids_BT, tables, sliding: bool = False) -> jax.Array:
        """[B, T, E] to the same.

        Args:
          tables: of the rotary angles of such a layer; None for none.
          sliding: whether its attention has the window.
        """
        return self.around(
            x_BTE, lambda x_BTE: self.attention(x_BTE, segment_ids_BT, tables, sliding)
        )

    def around(self, x_BTE: jax.Array, attend) -> jax.Array:
        """The layer with `attend`, normalised input -> what attention makes of it."""
        x_BTE = constrain(x_BTE, "batch", "residual", "embed")
        if self.placement == "post":
            x_BTE = self.attention_norm(x_BTE + attend(x_BTE))
            x_BTE = self.mlp_norm(x_BTE + self.mlp(x_BTE))
        else:
            x_BTE += self._after("attention", attend(self.attention_norm(x_BTE)))
            x_BTE += self._after("mlp", self.mlp(self.mlp_norm(x_BTE)))
        return constrain(x_BTE, "batch", "residual", "embed")

    def _after(self, part: str, y_BTE: jax.Array) -> jax.Array:
        return getattr(self, f"{part}_post_norm")(y_BTE) if self.placement == "pre_post" else y_BTE
