"""What each architecture's config.json says, as fields of `config.model` by dotted name, and back."""

from typing import Any

from jaxtpu.config import ModelConfig
from jaxtpu.errors import ConfigError

Json = dict[str, Any]

_ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


def _usual(hf: Json) -> Json:
    heads = hf["num_attention_heads"]
    return {
        "vocab_size": hf["vocab_size"],
        "embed": hf["hidden_size"],
        "layers": hf["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "mlp": hf["intermediate_size"],
        "tied_embeddings": hf["tie_word_embeddings"],
        "norm_epsilon": hf["rms_norm_eps"],
        "text.max_position_embeddings": hf["max_position_embeddings"],
        "text.hidden_act": _activation(hf.get("hidden_activation") or hf["hidden_act"]),
    }


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(
            "config.json", f"hidden_act={name!r}", "is not supported.", f"Supported: {known}."
        )
    return _ACTIVATIONS[name]


def _write_usual(model: ModelConfig) -> Json:
    names = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.text.max_position_embeddings,
        "hidden_act": names[model.text.hidden_act],
    }


def _rope(hf: Json) -> Json:
    """From the entries of either generation of transformers: rope_parameters, by kind of layer for
    some, or rope_theta, rope_scaling and rope_local_base_freq."""
    new = hf.get("rope_parameters") or {}
    local = new.get("sliding_attention") or {}
    whole = new.get("full_attention") or ({} if local else new)
    whole = whole | (hf.get("rope_scaling") or {})
    kind = whole.get("rope_type") or whole.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            "config.json", f"rope_type={kind!r}", "is not supported.",
            "Supported: default, linear, llama3.",
        )  # fmt: skip
    theta = float(whole.get("rope_theta") or hf["rope_theta"])
    local_theta = float(local.get("rope_theta") or hf.get("rope_local_base_freq") or 0.0)
    fields = {
        "rope_theta": theta,
        "text.rope_type": kind,
        "text.rope_local_theta": local_theta,
    }
    if kind != "default":
        fields["text.rope_factor"] = float(whole["factor"])
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            fields[f"text.{name}"] = whole[name]
    return fields


def _write_rope(model: ModelConfig) -> Json:
    text = model.text
    written: Json = {"rope_theta": model.rope_theta}
    if text.rope_type != "default":
        written["rope_scaling"] = {"rope_type": text.rope_type, "factor": text.rope_factor}
    if text.rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            written["rope_scaling"][name] = getattr(text, name)
    if text.rope_local_theta:
        written["rope_local_base_freq"] = text.rope_local_theta
    return written


def _windows(hf: Json, types: list[str] | None) -> Json:
    """Fields of a model whose layers are of `types`; None where all have the window, if any."""
    window = hf.get("sliding_window") or 0
    if types is None:
        return {"text.sliding_window": window}
    if "sliding_attention" not in types:
        return {}
    period = next(
        p for p in range(1, len(types) + 1) if all(t == types[i % p] for i, t in enumerate(types))
    )
    short = tuple(types[:period])
    return {"text.sliding_window": window} | (
        {} if short == ("sliding_attention",) else {"text.layer_types": short}
    )


def _write_types(model: ModelConfig) -> list[str]:
    text = model.text
    default = "sliding_attention" if text.sliding_window else "full_attention"
    types = text.layer_types or (default,)
    return [types[i % len(types)] for i in range(model.layers)]


def read_llama(hf: Json) -> Json:
    return _usual(hf) | _rope(hf) | {
        "text.attention_bias": "all" if hf["attention_bias"] else "none",
        "text.mlp_bias": hf["mlp_bias"],
    }  # fmt: skip


def write_llama(model: ModelConfig) -> Json:
    return _write_usual(model) | _write_rope(model) | {
        "attention_bias": model.text.attention_bias == "all",
        "mlp_bias": model.text.mlp_bias,
    }  # fmt: skip


def read_mistral(hf: Json) -> Json:
    return _usual(hf) | _rope(hf) | _windows(hf, None)


def write_mistral(model: ModelConfig) -> Json:
    window = model.text.sliding_window or None
    return _write_usual(model) | _write_rope(model) | {"sliding_window": window}


def read_qwen(hf: Json) -> Json:
    types = hf.get("layer_types")
    if not types:
        first = hf["max_window_layers"] if hf["use_sliding_window"] else hf["num_hidden_layers"]
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[i >= first] for i in range(hf["num_hidden_layers"])]
    return _usual(hf) | _rope(hf) | _windows(hf, types)


def write_qwen(model: ModelConfig) -> Json:
    return _write_usual(model) | _write_rope(model) | {
        "use_sliding_window": bool(model.text.sliding_window),
        "sliding_window": model.text.sliding_window or None,
        "layer_types": _write_types(model),
    }  # fmt: skip


def read_gemma(hf: Json, default_period: int) -> Json:
    period = hf.get("sliding_window_pattern") or default_period
    kinds = ("full_attention", "sliding_attention")
    usual = [kinds[(i + 1) % period > 0] for i in range(hf["num_hidden_layers"])]
    return _usual(hf) | _rope(hf) | _windows(hf, hf.get("layer_types") or usual) | {
        "text.query_pre_attn_scalar": float(hf["query_pre_attn_scalar"]),
        "text.attn_logit_softcapping": hf.get("attn_logit_softcapping") or 0.0,
        "text.final_logit_softcapping": hf.get("final_logit_softcapping") or 0.0,
    }  # fmt: skip


def write_gemma(model: ModelConfig) -> Json:
    text, usual = model.text, _write_usual(model)
    scalar = text.query_pre_attn_scalar or model.head_dim
    usual["hidden_activation"] = usual.pop("hidden_act")
    return usual | _write_rope(model) | {
        "sliding_window": text.sliding_window or None,
        "layer_types": _write_types(model),
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": text.attn_logit_softcapping or None,
        "final_logit_softcapping": text.final_logit_softcapping or None,
    }  # fmt: skip


def read_gpt2(hf: Json) -> Json:
    heads = hf["n_head"]
    return {
        "vocab_size": hf["vocab_size"],
        "embed": hf["n_embd"],
        "layers": hf["n_layer"],
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hf["n_embd"] // heads,
        "mlp": hf.get("n_inner") or 4 * hf["n_embd"],
        "tied_embeddings": hf["tie_word_embeddings"],
        "norm_epsilon": hf["layer_norm_epsilon"],
        "text.max_position_embeddings": hf["n_positions"],
        "text.hidden_act": _activation(hf["activation_function"]),
    }


def write_gpt2(model: ModelConfig) -> Json:
    names = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.embed,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.mlp,
        "tie_word_embeddings": model.tied_embeddings,
        "layer_norm_epsilon": model.norm_epsilon,
        "n_positions": model.text.max_position_embeddings,
        "activation_function": names[model.text.hidden_act],
    }


def read_mixtral(hf: Json) -> Json:
    return read_mistral(hf) | {
        "moe.num_experts": hf["num_local_experts"],
        "moe.num_experts_per_tok": hf["num_experts_per_tok"],
        "moe.norm_topk_prob": True,
        "moe.router_aux_loss_coef": hf["router_aux_loss_coef"],
    }


def write_mixtral(model: ModelConfig) -> Json:
    return write_mistral(model) | {
        "num_local_experts": model.moe.num_experts,
        "num_experts_per_tok": model.moe.num_experts_per_tok,
        "router_aux_loss_coef": model.moe.router_aux_loss_coef,
    }


def read_qwen_moe(hf: Json) -> Json:
    return read_qwen(hf) | {
        "mlp": hf["moe_intermediate_size"],
        "moe.num_experts": hf["num_experts"],
        "moe.num_experts_per_tok": hf["num_experts_per_tok"],
        "moe.norm_topk_prob": hf["norm_topk_prob"],
        "moe.shared_mlp": hf.get("shared_expert_intermediate_size") or 0,
        "moe.router_aux_loss_coef": hf["router_aux_loss_coef"],
    }


def write_qwen_moe(model: ModelConfig) -> Json:
    moe = model.moe
    shared = {"shared_expert_intermediate_size": moe.shared_mlp} if moe.shared_mlp else {}
    return write_qwen(model) | shared | {
        "moe_intermediate_size": model.mlp,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "norm_topk_prob": moe.norm_topk_prob,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip


def read_bert(hf: Json) -> Json:
    hf = hf | {"rms_norm_eps": hf["layer_norm_eps"]}
    return _usual(hf) | {"text.type_vocab_size": hf["type_vocab_size"]}


def write_bert(model: ModelConfig) -> Json:
    usual = _write_usual(model)
    dropped = ("num_key_value_heads", "head_dim", "rms_norm_eps")
    return {k: v for k, v in usual.items() if k not in dropped} | {
        "layer_norm_eps": model.norm_epsilon,
        "type_vocab_size": model.text.type_vocab_size,
        "position_embedding_type": "absolute",
    }
