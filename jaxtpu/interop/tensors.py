"""Which arrays of Hugging Face's files make up each of our parameters, and in what form."""

import dataclasses
import math

import numpy as np

from jaxtpu.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter of ours, of one layer and one expert, and the array that holds it.

    Attributes:
      ours: path of our parameter.
      theirs: name of the array, with {layer} and {expert} where there is one for each.
      inputs: dimensions of ours, from the first, that are one dimension of theirs, as the rest are
        the other; 0 for a vector.
      transposed: whether theirs has the inputs last, as PyTorch's linear layers have them.
      part: (i, n): ours is part i of n equal ones along their last dimension.
    """

    ours: str
    theirs: str
    inputs: int = 0
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    def view(self, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our array of `shape` as a view of theirs.

        Raises:
          ValueError: theirs has another shape.
        """
        index, count = self.part
        expected = self.shape(shape)
        if theirs.shape != expected:
            raise ValueError(f"has the shape {theirs.shape}, not {expected}")
        width = theirs.shape[-1] // count
        of_part = theirs[..., index * width : (index + 1) * width]
        return (of_part.T if self.transposed else of_part).reshape(shape)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of their array, for ours."""
        inputs, outputs = math.prod(ours[: self.inputs]), math.prod(ours[self.inputs :])
        if not self.inputs:
            return (outputs * self.part[1],)
        return (outputs, inputs) if self.transposed else (inputs, outputs * self.part[1])

    def array(self, ours: np.ndarray) -> np.ndarray:
        """Their array, or the part of it that ours is."""
        if not self.inputs:
            return ours.reshape(-1)
        matrix = ours.reshape(math.prod(ours.shape[: self.inputs]), -1)
        return matrix.T if self.transposed else matrix


def tensors(model: ModelConfig, model_type: str) -> list[Tensor]:
    """The arrays of a model of that type, in the order in which they are written."""
    return {"gpt2": _gpt2, "bert": _bert}.get(model_type, _llama)(model, model_type)


def base_prefix(model_type: str) -> str:
    """What the names of the model without its head may lack."""
    return {"gpt2": "transformer.", "bert": "bert."}.get(model_type, "model.")


def _linear(ours: str, theirs: str, bias: bool = False, inputs: int = 1) -> list[Tensor]:
    """Of a PyTorch linear layer."""
    made = [Tensor(f"{ours}/kernel", f"{theirs}.weight", inputs, transposed=True)]
    return made + ([Tensor(f"{ours}/bias", f"{theirs}.bias")] if bias else [])


def _norm(ours: str, theirs: str, bias: bool = False) -> list[Tensor]:
    made = [Tensor(f"{ours}/scale", f"{theirs}.weight")]
    return made + ([Tensor(f"{ours}/bias", f"{theirs}.bias")] if bias else [])


def _llama(model: ModelConfig, model_type: str) -> list[Tensor]:
    text, at, layer = model.text, "decoder/layers/", "model.layers.{layer}."
    qkv, out = text.attention_bias != "none", text.attention_bias == "all"
    found = [Tensor("embedding/table", "model.embed_tokens.weight", 1)]
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        found += _linear(f"{at}attention/{ours}", f"{layer}self_attn.{theirs}", qkv)
    found += _linear(f"{at}attention/out", f"{layer}self_attn.o_proj", out, inputs=2)
    if text.qk_norm:
        found += _norm(f"{at}attention/query_norm", f"{layer}self_attn.q_norm")
        found += _norm(f"{at}attention/key_norm", f"{layer}self_attn.k_norm")
    found += _norm(f"{at}attention_norm", f"{layer}input_layernorm")
    if text.norm_placement == "pre_post":
        found += _norm(f"{at}attention_post_norm", f"{layer}post_attention_layernorm")
        found += _norm(f"{at}mlp_norm", f"{layer}pre_feedforward_layernorm")
        found += _norm(f"{at}mlp_post_norm", f"{layer}post_feedforward_layernorm")
    else:
        found += _norm(f"{at}mlp_norm", f"{layer}post_attention_layernorm")
    if model.moe.num_experts:
        found += _experts(model, model_type)
    else:
        for name in ("gate", "up", "down"):
            found += _linear(f"{at}mlp/{name}", f"{layer}mlp.{name}_proj", text.mlp_bias)
    found += _norm("decoder/final_norm", "model.norm")
    return found + ([] if model.tied_embeddings else _linear("head", "lm_head"))


def _experts(model: ModelConfig, model_type: str) -> list[Tensor]:
    mixtral, at = model_type == "mixtral", "decoder/layers/mlp/"
    layer = "model.layers.{layer}." + ("block_sparse_moe." if mixtral else "mlp.")
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else names
    found = _linear(f"{at}router", f"{layer}gate")
    for ours, theirs in names.items():
        found += [Tensor(f"{at}{ours}", f"{layer}experts.{{expert}}.{theirs}.weight", 1, True)]
    if model.moe.shared_mlp:
        for name in ("gate", "up", "down"):
            found += _linear(f"{at}shared/{name}", f"{layer}shared_expert.{name}_proj")
        found += _linear(f"{at}shared_gate", f"{layer}shared_expert_gate")
    return found


def _gpt2(model: ModelConfig, model_type: str) -> list[Tensor]:
    at, layer = "decoder/layers/", "transformer.h.{layer}."
    found = [
        Tensor("embedding/table", "transformer.wte.weight", 1),
        Tensor("positions/table", "transformer.wpe.weight", 1),
        *_norm(f"{at}attention_norm", f"{layer}ln_1", True),
    ]
    for i, name in enumerate(("query", "key", "value")):
        ours, theirs = f"{at}attention/{name}", f"{layer}attn.c_attn"
        found.append(Tensor(f"{ours}/kernel", f"{theirs}.weight", 1, part=(i, 3)))
        found.append(Tensor(f"{ours}/bias", f"{theirs}.bias", part=(i, 3)))
    for ours, theirs, inputs in (
        ("attention/out", "attn.c_proj", 2), ("mlp/up", "mlp.c_fc", 1), ("mlp/down", "mlp.c_proj", 1),
    ):  # fmt: skip
        found.append(Tensor(f"{at}{ours}/kernel", f"{layer}{theirs}.weight", inputs))
        found.append(Tensor(f"{at}{ours}/bias", f"{layer}{theirs}.bias"))
    found += _norm(f"{at}mlp_norm", f"{layer}ln_2", True)
    found += _norm("decoder/final_norm", "transformer.ln_f", True)
    return found + ([] if model.tied_embeddings else _linear("head", "lm_head"))


def _bert(model: ModelConfig, model_type: str) -> list[Tensor]:
    at, layer, head = "decoder/layers/", "bert.encoder.layer.{layer}.", "cls.predictions."
    embeddings = "bert.embeddings."
    found = [
        Tensor("embedding/table", f"{embeddings}word_embeddings.weight", 1),
        Tensor("positions/table", f"{embeddings}position_embeddings.weight", 1),
        Tensor("types/table", f"{embeddings}token_type_embeddings.weight", 1),
        *_norm("embedding_norm", f"{embeddings}LayerNorm", True),
    ]
    for name in ("query", "key", "value"):
        found += _linear(f"{at}attention/{name}", f"{layer}attention.self.{name}", True)
    found += _linear(f"{at}attention/out", f"{layer}attention.output.dense", True, inputs=2)
    found += _norm(f"{at}attention_norm", f"{layer}attention.output.LayerNorm", True)
    found += _linear(f"{at}mlp/up", f"{layer}intermediate.dense", True)
    found += _linear(f"{at}mlp/down", f"{layer}output.dense", True)
    found += _norm(f"{at}mlp_norm", f"{layer}output.LayerNorm", True)
    found += [Tensor("head_bias", f"{head}bias")]
    found += _linear("transform", f"{head}transform.dense", True)
    found += _norm("transform_norm", f"{head}transform.LayerNorm", True)
    return found + ([] if model.tied_embeddings else _linear("head", f"{head}decoder"))
