"""Every architecture in `transformers`, tiny, with random weights and sizes that divide nothing."""

import functools
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="tests/requirements.txt is not installed")
transformers = pytest.importorskip("transformers")

GPT2_VOCABULARY = 50257
_COMMON = {
    "vocab_size": 261, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8,
    "max_position_embeddings": 96,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500.0,
}  # fmt: skip
_GEMMA = _COMMON | {"sliding_window": 5, "query_pre_attn_scalar": 13}

# name: (class of transformers, its config)
CASES = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": GPT2_VOCABULARY, "n_embd": 30, "n_layer": 2, "n_head": 5, "n_positions": 40,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama2": ("LlamaForCausalLM", _COMMON | {"num_key_value_heads": 6}),
    "llama3": ("LlamaForCausalLM", _COMMON | {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5}),
    "llama tied": (
        "LlamaForCausalLM",
        _COMMON | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralForCausalLM", _COMMON | {"sliding_window": 6}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {k: v for k, v in _COMMON.items() if k != "head_dim"} | {
            "vocab_size": GPT2_VOCABULARY, "tie_word_embeddings": True, "num_hidden_layers": 2},
    ),
    "qwen2 windows": (
        "Qwen2ForCausalLM",
        {k: v for k, v in _COMMON.items() if k != "head_dim"} | {
            "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", _COMMON | {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        _GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 3.0,
                  "final_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        _GEMMA | {"num_hidden_layers": 5, "layer_types": ["sliding_attention", "sliding_attention",
                  "full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "gemma3 stretched": (
        "Gemma3ForCausalLM",
        _GEMMA | {"tie_word_embeddings": False, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}},
    ),
}  # fmt: skip


@functools.cache
def reference(name: str):
    """The model in `transformers`, float32; no weight is 0 or 1, which would hide what it does."""
    kind, values = CASES[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**values, attn_implementation="eager")
    torch.manual_seed(len(name))
    model = model_class(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.05))
    return model


def save(model, folder: pathlib.Path, **options) -> pathlib.Path:
    model.save_pretrained(folder, **options)
    return folder


def numpy_of(tensor) -> np.ndarray:
    return tensor.detach().numpy()
