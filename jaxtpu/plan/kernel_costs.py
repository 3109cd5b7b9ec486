"""What Pallas kernels take, for which the compiler's schedule has no cycles.

A kernel takes the slower of its FLOPs, at the part of the peak that it reaches, and its bytes at
HBM's rate. FLOPs and bytes are those of the kernel's own `pl.CostEstimate`. JAX's splash attention
has none: it is known by its name, and its FLOPs follow from its shapes.

The parts of the peak were measured in the compiler's final schedule (`--xla_jf_dump_to`, libtpu
0.0.42.1): VLIW bundles of each part of a kernel, times how often it runs for 2048 positions and
heads of 128 features. A bundle is a cycle unless it waits; DMA waits are not in the schedule.
"""

import re

from jaxtpu.hardware import Generation
from jaxtpu.plan.hlo import Computation, Instruction

KERNEL = "tpu_custom_call"
_SPLASH = re.compile(r"/splash_m[hq]a_(fwd|dq|dkv)\w*/pallas_call")
_BLOCK = re.compile(r"block_q\W+(\d+)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # of positions x positions x features
# Of the peak, on the blocks of 512 x 512 that are on or below the diagonal. Bundles of one such
# block, forward: 1713 (v4), 1191 (v5e), 1163 (v5p), 937 (v6e); the rest starts and ends rows.
_SPLASH_EFFICIENCY = {
    "v4": {"fwd": 0.37, "dq": 0.57, "dkv": 0.56},
    "v5e": {"fwd": 0.64, "dq": 0.92, "dkv": 0.97},
    "v5p": {"fwd": 0.60, "dq": 0.85, "dkv": 0.83},
    "v6e": {"fwd": 0.21, "dq": 0.30, "dkv": 0.33},
}


def kernel_seconds(
    instruction: Instruction, computation: Computation, moved: int, generation: Generation
) -> float:
    """Seconds of a kernel.

    Args:
      moved: bytes of the operands and results, for a kernel that does not say.
    """
    known = instruction.backend_config.get("custom_call_config", {}).get("cost_estimate", {})
    moved = int(known.get("bytes_accessed", moved))
    flops, efficiency = int(known.get("flops", 0)), 1.0
    if splash := _SPLASH.search(instruction.op_name):
        phase = splash[1]
        flops = _PRODUCTS[phase] * _product_flops(instruction, computation)
        efficiency = _SPLASH_EFFICIENCY.get(generation.name, {}).get(phase, 1.0)
    return max(flops / (generation.peak_flops_bf16 * efficiency), moved / generation.hbm_bandwidth)


def _product_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of one product of all of splash attention's blocks that are not skipped."""
    shapes = [computation.by_name[name].shape for name in instruction.operands]
    queries = next(s for s in shapes if s.dtype in ("bf16", "f32") and len(s.dims) > 2)
    length = queries.dims[-2]
    block = _BLOCK.search(instruction.text)
    blocks = length // int(block[1]) if block else 1
    return 2 * queries.num_elements * length * (blocks + 1) / (2 * blocks)
