"""Checks across the fields of a model that reads text."""

from jaxtpu.config.remat import remat_actions
from jaxtpu.config.schema import Config, ModelConfig, OptimizerConfig
from jaxtpu.errors import ConfigError, nearest_multiples


def finalize_text(config: Config, vocab_size: int) -> None:
    """Fills in the fields that were left to be derived, and checks that they fit together.

    Args:
      config: changed in place.
      vocab_size: ids that the tokenizer uses.

    Raises:
      ConfigError: names the field, its value, and a value that works.
    """
    model = config.model
    if model.vocab_size == 0:
        model.vocab_size = vocab_size
    if model.vocab_size < vocab_size:
        raise ConfigError(
            "model.vocab_size", model.vocab_size,
            f"the tokenizer {config.data.tokenizer!r} has {vocab_size} ids.",
            f"Use {vocab_size}, or 0 to take the tokenizer's.",
        )  # fmt: skip
    _finalize_heads(model)
    _finalize_positions(config)
    _check_layers(model)
    _check_experts(model)
    text = model.text
    biased = text.mlp_bias or text.attention_bias != "none" or text.norm == "layernorm"
    if biased and config.optimizer.no_decay == OptimizerConfig().no_decay:
        config.optimizer.no_decay = (".*/scale", ".*/bias")
    remat_actions(model.remat, model.remat_tensors)


def _finalize_heads(model: ModelConfig) -> None:
    model.kv_heads = model.kv_heads or model.heads
    if model.heads % model.kv_heads:
        most = min(model.kv_heads, model.heads)
        best = next(n for n in range(most, 0, -1) if model.heads % n == 0)
        raise ConfigError(
            "model.kv_heads", model.kv_heads, f"does not divide model.heads={model.heads}.",
            f"Use {best}.",
        )  # fmt: skip
    rotary = model.text.position_embedding == "rope"
    if model.head_dim == 0:
        multiple = 2 * model.heads if rotary else model.heads
        if model.embed % multiple:
            even, why = (
                ("an even", ", which rotary positions turn in pairs") if rotary else ("a", "")
            )
            raise ConfigError(
                "model.embed", model.embed,
                f"does not give each of model.heads={model.heads} {even} number of features{why}.",
                f"{nearest_multiples(model.embed, multiple)[:-1]}, or set model.head_dim.",
            )  # fmt: skip
        model.head_dim = model.embed // model.heads
    if rotary and model.head_dim % 2:
        raise ConfigError(
            "model.head_dim", model.head_dim, "rotary positions turn pairs of features.",
            nearest_multiples(model.head_dim, 2),
        )  # fmt: skip


def _finalize_positions(config: Config) -> None:
    text, length = config.model.text, config.data.sequence_length
    if text.position_embedding == "learned":
        text.max_position_embeddings = text.max_position_embeddings or length
        if length > text.max_position_embeddings:
            raise ConfigError(
                "data.sequence_length", length, "is longer than the table of learned positions, "
                f"model.text.max_position_embeddings={text.max_position_embeddings}.",
                f"Use at most {text.max_position_embeddings}.",
            )  # fmt: skip
    if text.rope_type == "llama3" and not text.high_freq_factor > text.low_freq_factor:
        raise ConfigError(
            "model.text.high_freq_factor", text.high_freq_factor,
            f"must be above model.text.low_freq_factor={text.low_freq_factor}.",
            f"Use {4 * text.low_freq_factor}.",
        )  # fmt: skip


def _check_layers(model: ModelConfig) -> None:
    text = model.text
    if "sliding_attention" in text.layer_types and not text.sliding_window:
        raise ConfigError(
            "model.text.sliding_window", 0,
            "model.text.layer_types has layers of sliding_attention, which need a window.",
            "Use 4096, or layer_types=full_attention.",
        )  # fmt: skip
    if text.sliding_window and set(text.layer_types) == {"full_attention"}:
        raise ConfigError(
            "model.text.sliding_window", text.sliding_window,
            "model.text.layer_types has no layer of sliding_attention.", "Use 0.",
        )  # fmt: skip
    if text.norm_placement == "post" and model.name != "encoder":
        raise ConfigError(
            "model.text.norm_placement",
            "post",
            "is for model.name=encoder.",
            "Use pre or pre_post.",
        )


def _check_experts(model: ModelConfig) -> None:
    if count := model.moe.num_experts:
        raise ConfigError(
            "model.moe.num_experts", count, "there are no mixtures of experts yet.", "Use 0."
        )
