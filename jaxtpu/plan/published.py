"""Speeds that others measured on TPUs and published, with the setting of each as far as it is known.

`run.py plan --validate` compiles our own train step in these settings and compares. Every source
here counts 6 FLOPs a weight of a matrix product and the whole square of attention, and divides by
the peaks of `hardware.GENERATIONS`; so do we, so its figures are compared as they stand.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtpu.config import Config
from jaxtpu.hardware import parse_slice
from jaxtpu.models.transformer import flops_per_token

_LEVANTER = "https://github.com/stanford-crfm/levanter/blob/main/docs/Levanter-1.0-Release.md"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/MaxText/configs"
_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium"
_TIERS = "https://github.com/AI-Hypercomputer/maxtext/blob/main/docs/reference/models/tiering.md"
_FUJI = "https://github.com/apple/axlearn/blob/main/axlearn/experiments/text/gpt/fuji.py"


@dataclasses.dataclass(frozen=True)
class Published:
    """A measurement, and the setting to compile.

    Attributes:
      name: of the model.
      slice: as `hardware.parse_slice` reads it.
      model: fields of `config.model`.
      sequences: of the global batch.
      sequence_length: tokens.
      mesh: fields of `config.mesh`.
      remat: ours that comes nearest to the source's.
      source: address of the figure.
      mfu: model FLOPs utilisation as published, 0 to 1.
      step_seconds: as published, where the source has no MFU of this kind.
      attention: implementation.
      microbatches: of a step.
      options: of the compiler: those of the source that matter, or as `assumed` says.
      assumed: what the source does not say, or does and we do not have.
    """

    name: str
    slice: str
    model: Mapping[str, Any]
    sequences: int
    sequence_length: int
    mesh: Mapping[str, int]
    remat: str
    source: str
    mfu: float | None = None
    step_seconds: float | None = None
    attention: str = "splash"
    microbatches: int = 1
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assumed: str = ""

    def config(self) -> Config:
        """The setting, not finalized."""
        config = Config()
        config.model.update(dict(self.model))
        config.model.update({"remat": self.remat, "attention": self.attention})
        config.mesh.update(dict(self.mesh))
        config.data.batch_size = self.sequences
        config.data.sequence_length = self.sequence_length
        config.train.microbatches = self.microbatches
        config.train.steps = 1000
        return config

    def mfu_at(self, step_seconds: float, config: Config) -> float:
        """MFU of a step that takes so long.

        Args:
          config: the setting, finalized.
        """
        slice_ = parse_slice(self.slice)
        needed = flops_per_token(config.model, self.sequence_length)
        peak = slice_.generation.peak_flops_bf16 * slice_.devices
        return needed * self.sequences * self.sequence_length / step_seconds / peak

    def published_mfu(self, config: Config) -> float:
        """The figure to meet."""
        return self.mfu if self.mfu is not None else self.mfu_at(self.step_seconds, config)


def _gpt2(embed: int, layers: int, heads: int, mlp: int) -> dict[str, Any]:
    """Shapes of Levanter's `config/gpt2_*.yaml`. Its MLP has 2 matrices of 4 x embed features, ours
    3 of two thirds of that, to the next multiple of 128; both its vocabularies pad to 50304."""
    return {
        "vocab_size": 50257, "embed": embed, "layers": layers, "heads": heads, "mlp": mlp,
        "tied_embeddings": True,
    }  # fmt: skip


def _maxtext(
    embed: int, layers: int, heads: int, mlp: int, head_dim: int, kv_heads: int = 0
) -> dict[str, Any]:
    return {
        "vocab_size": 32000, "embed": embed, "layers": layers, "heads": heads, "mlp": mlp,
        "head_dim": head_dim, "kv_heads": kv_heads,
    }  # fmt: skip


_LLAMA2_7B = _maxtext(4096, 32, 32, 11008, 128)
_LLAMA2_70B = _maxtext(8192, 80, 64, 28672, 128, kv_heads=8)
_LLAMA3_8B = {**_maxtext(4096, 32, 32, 14336, 128, kv_heads=8), "vocab_size": 128256}
_MISTRAL_7B = _maxtext(4096, 32, 32, 14336, 128, kv_heads=8)

# Options of the compiler. No loops of products over permutes; much vector memory; scattered gradients.
_NO_LOOPS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "98304"}
_SCATTER = {
    "xla_tpu_use_minor_sharding_for_major_trivial_input": "true",
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": "1",
    "xla_tpu_assign_all_reduce_scatter_layout": "true",
}

# Scores of T x T in memory: Levanter had no attention kernel at the time of these figures.
_LEVANTER_WAY = {
    "slice": "v3-256", "mesh": {"fsdp": 256}, "remat": "full", "attention": "xla",
    "source": _LEVANTER,
}  # fmt: skip
_GPT2_ASSUMED = (
    "SwiGLU for GELU, RMSNorm for LayerNorm, no biases, no dropout; scores in float32, "
    "where Levanter kept them in bfloat16"
)
_SMALL = f"{_GPT2_ASSUMED}; batch: the trainer's default of 512"
_LARGE = f"{_GPT2_ASSUMED}; batch 1024 as in the configs of 7B and 20B"

_LEVANTER_ROWS = (
    Published("GPT-2 345M", model=_gpt2(1024, 24, 16, 2688), sequences=512, sequence_length=1024,
              mfu=0.351, assumed=_SMALL, **_LEVANTER_WAY),
    Published("GPT-2 750M", model=_gpt2(1280, 36, 20, 3456), sequences=512, sequence_length=1024,
              mfu=0.389, assumed=_SMALL, **_LEVANTER_WAY),
    Published("GPT-2 1.4B", model=_gpt2(1536, 48, 24, 4096), sequences=512, sequence_length=1024,
              mfu=0.417, assumed=_SMALL, **_LEVANTER_WAY),
    Published("GPT-2 6.7B", model=_gpt2(4096, 32, 32, 10880), sequences=1024, sequence_length=2048,
              mfu=0.473, assumed=_LARGE, **_LEVANTER_WAY),
    Published("GPT-2 13B", model=_gpt2(5120, 40, 40, 13696), sequences=1024, sequence_length=2048,
              mfu=0.544, assumed=f"{_LARGE}; shapes of GPT-3 13B", **_LEVANTER_WAY),
    Published("GPT-2 20B", model=_gpt2(6144, 44, 64, 16384), sequences=1024, sequence_length=2048,
              mfu=0.509, assumed=_LARGE, **_LEVANTER_WAY),
    Published("GPT-2 65B", model=_gpt2(8192, 80, 64, 21888), sequences=512, sequence_length=2048,
              mfu=0.446, assumed=f"{_GPT2_ASSUMED}; shapes of LLaMA 65B; batch 512, as 1024 does "
              "not fit", **_LEVANTER_WAY),
)  # fmt: skip

# The sizes are those of MaxText's base.yml at a `global_parameter_scale`. The options that its
# scripts give the compiler are today's defaults: with and without, 32B on v5p took equal time.
_SCALE_16 = _maxtext(4096, 32, 64, 28672, 128)
_SCALE_32 = _maxtext(8192, 32, 64, 28672, 128)
_SCALE_64 = _maxtext(8192, 64, 64, 28672, 128)
_SCALE_128 = _maxtext(8192, 64, 128, 57344, 128)
_RELU = "SwiGLU of two thirds the width for an MLP of 2 matrices; sequence 2048 (the default)"
_MINIMAL = "remat `minimal`, which saves what `dots` does"
_PARTS = (
    "in parts, as the residual stream, which ours does not divide along tensor, would not fit; "
    "products not made into loops over permutes, which today's compiler does and finds half as fast"
)

# What a user ran, with his log and his fork of the repository.
_ISSUE = "https://github.com/AI-Hypercomputer/maxtext/issues/8"
_USERS_MODEL = {
    **_maxtext(2048, 16, 8, 5504, 256), "vocab_size": 16384, "tied_embeddings": True,
}  # fmt: skip

_MAXTEXT_ROWS = (
    Published("MaxText 0.8B", "v3-8", _USERS_MODEL, 16 * 8, 1024, {"fsdp": 8}, "dots", _ISSUE,
              step_seconds=2.167, attention="xla", assumed=f"shapes, batch and mesh: base.yml of "
              f"his fork, amankhandelia/maxtext; {_MINIMAL}; SwiGLU for ReLU at equal weights"),
    Published("MaxText 22B", "v4-128", _maxtext(6144, 48, 24, 16384, 256), 13 * 64, 2048,
              {"fsdp": 64}, "full", f"{_MAXTEXT}/v4/README.md", 0.567, assumed=_RELU),
    Published("MaxText 52B", "v4-384", _maxtext(12288, 32, 32, 32768, 256), 7 * 192, 2048,
              {"fsdp": 192}, "full", f"{_MAXTEXT}/v4/README.md", 0.560, assumed=_RELU),
    Published("MaxText 16B", "v5e-256", _SCALE_16, 6 * 256, 2048, {"fsdp": 256}, "full",
              f"{_MAXTEXT}/v5e/README.md", 0.6110),
    Published("MaxText 32B", "v5e-256", _SCALE_32, 4 * 256, 2048, {"fsdp": 256}, "full",
              f"{_MAXTEXT}/v5e/README.md", 0.6686),
    Published("MaxText 64B", "v5e-256", _SCALE_64, 2 * 256, 2048, {"fsdp": 256}, "full",
              f"{_MAXTEXT}/v5e/README.md", 0.5990),
    Published("MaxText 16B", "2xv5e-256", _SCALE_16, 6 * 512, 2048, {"data": 2, "fsdp": 256},
              "full", f"{_MAXTEXT}/v5e/README.md", 0.5937),
    Published("MaxText 32B", "v5p-128", _SCALE_32, 6 * 64, 2048, {"fsdp": 16, "tensor": 4},
              "dots", f"{_MAXTEXT}/v5p/README.md", 0.7147, microbatches=2,
              assumed=f"{_MINIMAL}; {_PARTS}", options=_NO_LOOPS),
    Published("MaxText 64B", "v5p-128", _SCALE_64, 3 * 64, 2048, {"fsdp": 16, "tensor": 4},
              "dots", f"{_MAXTEXT}/v5p/README.md", 0.7031, microbatches=3,
              assumed=f"{_MINIMAL}; {_PARTS}", options=_NO_LOOPS),
    Published("MaxText 128B", "v5p-256", _SCALE_128, 128, 2048, {"fsdp": 16, "tensor": 8},
              "dots", f"{_MAXTEXT}/v5p/README.md", 0.6868, microbatches=2,
              assumed=f"{_MINIMAL}; {_PARTS}", options=_NO_LOOPS),
)  # fmt: skip

_OFFLOADED = "`full` for a remat that keeps queries, keys, values and outputs on the host"
_LLAMA_ROWS = (
    Published("Llama 2 70B", "v6e-256", _LLAMA2_70B, 2 * 256, 4096, {"fsdp": 256}, "full",
              f"{_RECIPES}/Llama2-70B-MaxText", 0.438, options=_VMEM,
              assumed=f"{_OFFLOADED}; 2 sequences a chip, by the tokens of its log"),
    Published("Llama 3.1 8B", "v6e-256", _LLAMA3_8B, 4 * 256, 8192, {"fsdp": 256}, "full",
              f"{_RECIPES}/Llama3.1-8B-MaxText/v6e-256", 0.4546, options=_VMEM | _SCATTER,
              assumed=_OFFLOADED),
    Published("Llama 3.1 8B", "v6e-8", _LLAMA3_8B, 3 * 8, 8192, {"fsdp": 8}, "full",
              f"{_RECIPES}/Llama3.1-8B-MaxText/v6e-8", 413.433 / 918, options=_VMEM | _SCATTER | _NO_LOOPS,
              microbatches=3, assumed=f"{_OFFLOADED}, as are layer inputs: hence in 3 parts"),
    Published("Mistral 7B", "v6e-8", _MISTRAL_7B, 6 * 8, 8192, {"fsdp": 8}, "full",
              f"{_RECIPES}/Mistral-7B-MaxText", 431.981 / 918, options=_VMEM | _SCATTER | _NO_LOOPS,
              microbatches=2, assumed=f"{_OFFLOADED}, as are layer inputs: hence in 2 parts"),
    Published("Llama 2 70B", "v5p-1024", _LLAMA2_70B, 4 * 512, 4096, {"fsdp": 512}, "full",
              _TIERS, 0.654,
              assumed="4 sequences a chip, as MaxText's script for v5p-512; "
              "`full` for `save_dot_except_mlpwi`, which recomputes half as much"),
    Published("Fuji 7B v2", "4xv5e-256", _LLAMA2_7B, 1024, 4096, {"data": 4, "fsdp": 256}, "dots",
              _FUJI, step_seconds=2.21, assumed="batch of 4M tokens"),
    Published("Fuji 70B v2", "4xv5e-256", _LLAMA2_70B, 1024, 4096, {"data": 4, "fsdp": 256},
              "full", _FUJI, step_seconds=14.3736,
              assumed="batch: one sequence a chip, from the MFU given; `full` for products kept "
              "on the host"),
)  # fmt: skip

ROWS: tuple[Published, ...] = _LEVANTER_ROWS + _MAXTEXT_ROWS + _LLAMA_ROWS
