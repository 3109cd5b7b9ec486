"""The sections of models that read text: `model.text`, what families differ in, and `model.moe`.

Where Hugging Face's config.json has a name for something, the field has it too.
"""

import dataclasses

from jaxtpu.config.section import Section, option

KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass
class TextConfig(Section, path="model.text"):
    """What text models differ in; the defaults are Llama's."""

    position_embedding: str = option(
        "rope",
        "rope (rotary, in attention), or learned (a table added to the embedding: GPT-2, BERT)",
        choices=("rope", "learned"),
    )
    max_position_embeddings: int = option(
        0, "positions of the learned table; 0 means data.sequence_length", at_least=0
    )
    rope_type: str = option(
        "default",
        "how rotary angles are stretched to longer sequences: default (not), linear, or llama3",
        choices=("default", "linear", "llama3"),
    )
    rope_factor: float = option(1.0, "by how much (rope_type=linear, llama3)", at_least=1.0)
    low_freq_factor: float = option(
        1.0, "rope_type=llama3: wavelengths above original_max_position_embeddings / this are "
        "stretched whole", at_least=0.0,
    )  # fmt: skip
    high_freq_factor: float = option(
        4.0, "rope_type=llama3: wavelengths below original_max_position_embeddings / this are not "
        "stretched", at_least=0.0,
    )  # fmt: skip
    original_max_position_embeddings: int = option(
        8192, "rope_type=llama3: positions that the model was first trained on", at_least=1
    )
    rope_local_theta: float = option(
        0.0,
        "base of the rotary angles in layers of sliding attention, which are not stretched; 0: all "
        "layers have model.rope_theta (Gemma 3: 10000)",
        at_least=0.0,
    )
    norm: str = option(
        "rmsnorm",
        "rmsnorm, rmsnorm_plus_one (the scale is 1 + the weight: Gemma), or layernorm (with bias)",
        choices=("rmsnorm", "rmsnorm_plus_one", "layernorm"),
    )
    norm_placement: str = option(
        "pre",
        "where a layer's parts are normalised: pre (their input), pre_post (their output too: "
        "Gemma 2 and 3), or post (the sum: BERT)",
        choices=("pre", "pre_post", "post"),
    )
    qk_norm: bool = option(False, "queries and keys are normalised, head by head (Qwen 3, Gemma 3)")
    attention_bias: str = option(
        "none", "biases of attention: none, qkv (Qwen 2), or all (the output's too: GPT-2)",
        choices=("none", "qkv", "all"),
    )  # fmt: skip
    mlp_bias: bool = option(False, "biases of the MLP")
    gated_mlp: bool = option(True, "the MLP is gated: activation(gate) * up")
    hidden_act: str = option(
        "silu", "activation of the MLP: silu, gelu, or gelu_tanh (GELU by its tanh approximation)",
        choices=("silu", "gelu", "gelu_tanh"),
    )  # fmt: skip
    sliding_window: int = option(
        0, "positions that sliding attention sees, its own included; 0 for all", at_least=0
    )
    layer_types: tuple[str, ...] = option(
        (),
        "which layers have sliding attention, repeated over the layers: sliding_attention, "
        "full_attention; empty: all, where sliding_window is set",
        choices=KINDS,
    )
    query_pre_attn_scalar: float = option(
        0.0, "scores are divided by its square root; 0 means model.head_dim", at_least=0.0
    )
    attn_logit_softcapping: float = option(
        0.0, "scores are cap * tanh(score / cap); 0 for no cap (Gemma 2: 50)", at_least=0.0
    )
    final_logit_softcapping: float = option(
        0.0, "the logits are cap * tanh(logit / cap); 0 for no cap (Gemma 2: 30)", at_least=0.0
    )
    scale_embeddings: bool = option(
        False, "embeddings are multiplied by the square root of model.embed (Gemma)"
    )
    type_vocab_size: int = option(
        2, "segment types of which the encoder adds the first one's embedding", at_least=1
    )


@dataclasses.dataclass
class MixtureConfig(Section, path="model.moe"):
    """A mixture of experts in place of each layer's MLP; model.mlp is then one expert's."""

    num_experts: int = option(0, "experts of a layer; 0 for one MLP", at_least=0)
    num_experts_per_tok: int = option(2, "experts that a token goes to", at_least=1)
    norm_topk_prob: bool = option(
        True, "the chosen experts' probabilities are made to sum to 1 (Mixtral, Qwen 3)"
    )
    shared_mlp: int = option(
        0, "hidden features of an expert that all tokens go to, through a gate (Qwen 2); 0 for none",
        at_least=0,
    )  # fmt: skip
    router_aux_loss_coef: float = option(
        0.01, "factor of the load-balancing loss (arXiv:2101.03961) in training", at_least=0.0
    )


def layer_pattern(model) -> tuple[bool, ...]:
    """Whether the layers of a `ModelConfig` have sliding attention, up to where that repeats."""
    text = model.text
    types = text.layer_types or (KINDS[1] if text.sliding_window else KINDS[0],)
    kinds = tuple(types[i % len(types)] == KINDS[1] for i in range(model.layers))
    repeats = lambda p: all(kind == kinds[i % p] for i, kind in enumerate(kinds))  # noqa: E731
    return kinds[: next(p for p in range(1, model.layers + 1) if repeats(p))]
