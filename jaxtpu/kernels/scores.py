"""What attention does with its scores, and what of that the config's model asks for."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxtpu.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Scores:
    """How the products of queries and keys become weights; hashable, as kernels keep it.

    Attributes:
      causal: whether a position sees none after it.
      window: a position sees keys less than this many positions from it; 0 for all.
      soft_cap: scores are cap * tanh(score / cap); 0 for no cap.
      scalar: scores are divided by its root; 0 means the features of a head.
    """

    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    scalar: float = 0.0

    def scale(self, features: int) -> float:
        """What products are multiplied by."""
        return (self.scalar or features) ** -0.5

    def capped(self, scores: jax.Array) -> jax.Array:
        return soft_capped(scores, self.soft_cap)

    def sees(self, query_positions: jax.Array, key_positions: jax.Array) -> jax.Array:
        """Whether each query sees each key of its document; positions are those in the row, and
        their shapes are broadcast against each other."""
        if self.causal:
            seen = query_positions >= key_positions
            if self.window:
                seen &= query_positions - key_positions < self.window
            return seen
        distance = jnp.abs(query_positions - key_positions)
        return distance < self.window if self.window else distance >= 0

    @property
    def special(self) -> tuple[str, ...]:
        """What a kernel that is made for plain causal attention has none of."""
        asked = {
            "attention in both directions": not self.causal,
            "model.text.sliding_window": self.window,
            "model.text.attn_logit_softcapping": self.soft_cap,
        }
        return tuple(name for name, value in asked.items() if value)


CAUSAL = Scores()


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(x / cap), which is between -cap and cap; `x` itself where cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def scores_of(model: ModelConfig, sliding: bool | None = None) -> Scores:
    """What the layers of `model` do with their scores.

    Args:
      sliding: of the layers with sliding attention, or the others; None for all that any has.
    """
    text = model.text
    slides = "sliding_attention" in (text.layer_types or ("sliding_attention",))
    sliding = slides if sliding is None else sliding
    return Scores(
        causal=model.name != "encoder",
        window=text.sliding_window if sliding else 0,
        soft_cap=text.attn_logit_softcapping,
        scalar=text.query_pre_attn_scalar,
    )
