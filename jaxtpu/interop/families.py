"""The architectures of Hugging Face that there are, and what their config.json says in our fields.

A family maps both ways; `model_fields(hf_config(fields))` gives the fields back, which is also how
the family of a model is found.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtpu.config import ModelConfig
from jaxtpu.errors import ConfigError
from jaxtpu.interop.hf_config import (
    Json,
    read_bert,
    read_gemma,
    read_gpt2,
    read_llama,
    read_mistral,
    read_mixtral,
    read_qwen,
    read_qwen_moe,
    write_bert,
    write_gemma,
    write_gpt2,
    write_llama,
    write_mistral,
    write_mixtral,
    write_qwen,
    write_qwen_moe,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
      architecture, model_type: its names in config.json.
      fixed: fields of `model` that it always has, dotted.
      read: (config.json, with defaults filled in) -> the other fields, dotted.
      write: `ModelConfig` -> the other entries of config.json.
      defaults: entries that config.json may lack.
      refused: entries with the values that are supported; others are named in an error.
    """

    architecture: str
    model_type: str
    fixed: Json
    read: Callable[[Json], Json]
    write: Callable[[ModelConfig], Json]
    defaults: Json
    refused: dict[str, tuple] = dataclasses.field(default_factory=dict)

    def model_fields(self, hf: Json) -> Json:
        """Fields of `config.model`, by dotted name below it.

        Raises:
          ConfigError: something of the architecture that is not supported.
        """
        hf = self.defaults | {k: v for k, v in hf.items() if v is not None}
        for key, allowed in self.refused.items():
            if hf.get(key) not in (None, *allowed):
                raise ConfigError(
                    "config.json", f"{key}={hf[key]!r}", f"is not supported in {self.architecture}.",
                    f"Supported: {', '.join(map(repr, allowed))}.",
                )  # fmt: skip
        return self.fixed | self.read(hf)

    def hf_config(self, model: ModelConfig) -> Json:
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.write(model),
        }


_LLAMA = {
    "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
_QWEN = _LLAMA | {
    "use_sliding_window": False, "max_window_layers": 28, "max_position_embeddings": 32768,
}  # fmt: skip
_MOE = {"router_aux_loss_coef": 0.001, "norm_topk_prob": False}
_GEMMA = _LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "head_dim": 256,
}  # fmt: skip
_GEMMA_FIXED = {
    "text.norm": "rmsnorm_plus_one", "text.norm_placement": "pre_post",
    "text.scale_embeddings": True,
}  # fmt: skip
_BERT_FIXED = {
    "name": "encoder", "text.norm": "layernorm", "text.norm_placement": "post",
    "text.position_embedding": "learned", "text.attention_bias": "all", "text.mlp_bias": True,
    "text.gated_mlp": False,
}  # fmt: skip
_GPT2_FIXED = {
    "text.norm": "layernorm", "text.position_embedding": "learned", "text.attention_bias": "all",
    "text.mlp_bias": True, "text.gated_mlp": False,
}  # fmt: skip
_SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}

# Where several have the same fields, the first is the one that is exported.
FAMILIES = (
    Family("LlamaForCausalLM", "llama", {}, read_llama, write_llama, _LLAMA),
    Family(
        "MistralForCausalLM", "mistral", {}, read_mistral, write_mistral,
        _LLAMA | {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    Family(
        "Qwen2ForCausalLM", "qwen2", {"text.attention_bias": "qkv"}, read_qwen, write_qwen, _QWEN
    ),
    Family(
        "Qwen3ForCausalLM", "qwen3", {"text.qk_norm": True}, read_qwen, write_qwen,
        _QWEN | {"head_dim": 128}, {"attention_bias": (False,)},
    ),
    Family(
        "Gemma2ForCausalLM", "gemma2", _GEMMA_FIXED, lambda hf: read_gemma(hf, 2), write_gemma,
        _GEMMA | {"max_position_embeddings": 8192},
        {"attention_bias": (False,), "use_bidirectional_attention": (False,)},
    ),
    Family(
        "Gemma3ForCausalLM", "gemma3_text", _GEMMA_FIXED | {"text.qk_norm": True},
        lambda hf: read_gemma(hf, 6), write_gemma,
        _GEMMA | {
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072,
        },
        {"attention_bias": (False,), "use_bidirectional_attention": (False,),
         "attn_logit_softcapping": ()},
    ),
    Family(
        "GPT2LMHeadModel", "gpt2", _GPT2_FIXED, read_gpt2, write_gpt2,
        {"activation_function": "gelu_new", "tie_word_embeddings": True,
         "layer_norm_epsilon": 1e-5, "n_positions": 1024},
        {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
         "add_cross_attention": (False,)},
    ),
    Family(
        "MixtralForCausalLM", "mixtral", {}, read_mixtral, write_mixtral,
        _LLAMA | _MOE | {"rope_theta": 1e6, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                         "max_position_embeddings": 131072},
    ),
    Family(
        "Qwen2MoeForCausalLM", "qwen2_moe", {"text.attention_bias": "qkv"}, read_qwen_moe,
        write_qwen_moe, _QWEN | _MOE | {"shared_expert_intermediate_size": 5632},
        {"qkv_bias": (True,), **_SPARSE},
    ),
    Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", {"text.qk_norm": True}, read_qwen_moe, write_qwen_moe,
        _QWEN | _MOE | {"num_key_value_heads": 4}, {"attention_bias": (False,), **_SPARSE},
    ),
    Family(
        "BertForMaskedLM", "bert", _BERT_FIXED, read_bert, write_bert,
        {"hidden_act": "gelu", "tie_word_embeddings": True, "layer_norm_eps": 1e-12,
         "max_position_embeddings": 512, "type_vocab_size": 2},
        {"position_embedding_type": ("absolute",), "is_decoder": (False,),
         "add_cross_attention": (False,)},
    ),
)  # fmt: skip


def family_of(hf: Json, folder: str) -> Family:
    """The family of a config.json.

    Raises:
      ConfigError: it is not supported; those that are are named.
    """
    names = hf.get("architectures") or [hf.get("model_type", "")]
    for family in FAMILIES:
        if family.architecture in names or names == [family.model_type]:
            return family
    raise ConfigError(
        "--from", folder, f"holds the architecture {', '.join(names) or 'of no name'}, which is not "
        "supported.", f"Supported: {', '.join(f.architecture for f in FAMILIES)}.",
    )  # fmt: skip


def family_of_model(model: ModelConfig) -> Family:
    """The family that says all that the fields of `model` say.

    Raises:
      ConfigError: none does.
    """
    for family in FAMILIES:
        if not _differences(model, family):
            return family
    closest = min(FAMILIES, key=lambda family: len(_differences(model, family)))
    name, value, theirs = _differences(model, closest)[0]
    raise ConfigError(
        f"model.{name}", value,
        f"is in no architecture that can be exported together with the other fields; the nearest is "
        f"{closest.architecture}.", f"It has {theirs!r}.",
    )  # fmt: skip


_NOT_OF_WEIGHTS = ("attention", "remat", "vision.", "vocab_multiple", "mlp_multiple", "init_std",
                   "moe.router_", "text.query_pre", "name", "text.max_position")  # fmt: skip


def flat_fields(model: ModelConfig) -> Json:
    """Fields of `model` by dotted name below it."""

    def flat(values: Json, prefix: str) -> Json:
        found: Json = {}
        for name, value in values.items():
            found |= (
                flat(value, f"{prefix}{name}.")
                if isinstance(value, dict)
                else {prefix + name: value}
            )
        return found

    return flat(model.to_dict(), "")


def _differences(model: ModelConfig, family: Family) -> list[tuple[str, Any, Any]]:
    """(field, value, value after export and import) of those that the weights are computed with."""
    again = ModelConfig()
    try:
        again.update(family.model_fields(family.hf_config(model)))
    except (ConfigError, KeyError) as error:
        return [("name", model.name, str(error))] * 99
    ours, theirs = flat_fields(model), flat_fields(again)
    found = [] if model.name == again.name else [("name", model.name, again.name)]
    scalar = lambda fields: fields["text.query_pre_attn_scalar"] or fields["head_dim"]  # noqa: E731
    if scalar(ours) != scalar(theirs):
        found.append(("text.query_pre_attn_scalar", scalar(ours), scalar(theirs)))
    return found + [
        (name, value, theirs[name])
        for name, value in ours.items()
        if not name.startswith(_NOT_OF_WEIGHTS) and value != theirs[name]
        and not (name.startswith("moe.") and not model.moe.num_experts)
    ]  # fmt: skip
