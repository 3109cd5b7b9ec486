"""Memory per device: of live devices where they count it, of compiled programs everywhere."""

from typing import Any

import jax

from jaxtpu.mesh import peak_memory_bytes


def program_bytes(compiled: Any, platform: str) -> int:
    """What one device must hold to run a compiled program, by the compiler's own account."""
    analysis = compiled.memory_analysis()
    if platform == "cpu":  # its compiler's "peak" leaves the temporaries out
        arguments, outputs = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
        return arguments + outputs - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    total = getattr(analysis, "total_allocation_bytes", 0)  # jax 0.12; 0.10 has the peak only
    return total or analysis.peak_memory_in_bytes


def tree_bytes_per_device(abstract: Any) -> int:
    """Bytes of one device's part of a tree of `jax.ShapeDtypeStruct`s with shardings."""
    total = 0
    for leaf in jax.tree.leaves(abstract):
        elements = 1
        for size in leaf.sharding.shard_shape(leaf.shape):
            elements *= size
        total += elements * leaf.dtype.itemsize
    return total


def peak_memory(compiled: Any, devices: list[jax.Device]) -> tuple[int, str]:
    """(bytes, where the number is from): a device's peak, or the program's size by the compiler."""
    measured = peak_memory_bytes(devices)
    if measured is not None:
        return measured, "measured"
    return program_bytes(compiled, devices[0].platform), "the compiler's figure for the train step"
