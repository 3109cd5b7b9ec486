"""What Pallas kernels take, for which the compiler's schedule has no cycles.

A kernel takes the slower of its FLOPs, at the part of the peak that it reaches, and its bytes at
HBM's rate. FLOPs and bytes are those of the kernel's own `pl.CostEstimate`. JAX's splash attention
has none: it is known by its name, and its FLOPs follow from its shapes.

The parts of the peak were measured in the compiler's final schedule (`--xla_jf_dump_to`, libtpu
0.0.42.1): VLIW bundles of each part of a kernel and the delays that the schedule states, times
how often it runs for 2048 positions and heads of 128 features; at least the time that the matrix
units need. Waits for DMA are not in it, nor are those that v4 and later make by themselves.
"""

import math
import re

from jaxtpu.hardware import Generation
from jaxtpu.plan.hlo import Computation, Instruction

KERNEL = "tpu_custom_call"
_NAME = re.compile(r"(flash_forward|flash_backward|splash_mha_(?:fwd|dq|dkv))\w*(?:/pallas_call)?$")
_BLOCK = re.compile(r"block_q\W+(\d+)")
_USUAL_BLOCK = 512
_LANES = 128  # of a matrix unit, taken by smaller heads too
# Products of positions x positions x features.
_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
# Of the peak, on the blocks of 512 x 512 that are on or below the diagonal. Cycles of one such
# block, forward: 4467 (v2), 2597 (v3); 1713 (v4), 1191 (v5e), 1163 (v5p), 937 (v6e). The rest
# starts and ends rows of blocks.
_EFFICIENCY = {
    "flash_forward": {"v2": 0.79, "v3": 0.61},
    "flash_backward": {"v2": 0.90, "v3": 0.81},
    "splash_mha_fwd": {"v4": 0.37, "v5e": 0.64, "v5p": 0.60, "v6e": 0.21},
    "splash_mha_dq": {"v4": 0.57, "v5e": 0.89, "v5p": 0.84, "v6e": 0.30},
    "splash_mha_dkv": {"v4": 0.56, "v5e": 0.88, "v5p": 0.78, "v6e": 0.33},
}


def kernel_seconds(
    instruction: Instruction, computation: Computation, moved: int, generation: Generation
) -> float:
    """Seconds of a kernel.

    Args:
      moved: bytes of the operands and results, for a kernel that does not say.
    """
    moved = int(_stated(instruction).get("bytes_accessed", moved))
    peak = generation.peak_flops_bf16 * efficiency(kernel_name(instruction.op_name), generation)
    flops = kernel_flops(instruction, computation)
    return max(flops / peak, moved / generation.hbm_bandwidth)


def kernel_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of a kernel's products, without blocks that it skips."""
    name = kernel_name(instruction.op_name)
    if name not in _PRODUCTS:
        return int(_stated(instruction).get("flops", 0))
    shapes = [computation.by_name[operand].shape for operand in instruction.operands]
    queries = next(s for s in shapes if s.dtype in ("bf16", "f32") and len(s.dims) > 2)
    block = _BLOCK.search(instruction.text)
    return splash_flops(name, queries.dims, int(block[1]) if block else _USUAL_BLOCK)


def _stated(instruction: Instruction) -> dict:
    """The kernel's own cost estimate."""
    return instruction.backend_config.get("custom_call_config", {}).get("cost_estimate", {})


def kernel_name(name: str) -> str:
    """Which of the measured kernels a kernel, or the path of its operation, is; "" for another."""
    found = _NAME.search(name)
    return found[1] if found else ""


def efficiency(name: str, generation: Generation) -> float:
    """Part of the peak that a kernel reaches; 1 where it was not measured."""
    return _EFFICIENCY.get(name, {}).get(generation.name, 1.0)


def splash_flops(name: str, queries: tuple[int, ...], block: int = _USUAL_BLOCK) -> float:
    """FLOPs of splash attention's blocks that are not skipped; 0 for another kernel.

    Args:
      name: of `kernel_name`.
      queries: [..., positions, features].
      block: positions of a block.
    """
    *heads, length, features = queries
    blocks = max(1, length // block)
    seen = length**2 * (blocks + 1) / (2 * blocks)
    product = 2 * math.prod(heads) * seen * (features + -features % _LANES)
    return _PRODUCTS.get(name, 0) * product
