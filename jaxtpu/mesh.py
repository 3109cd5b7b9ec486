"""Devices, real, emulated or compile-only, as a `Mesh` with the axes of the config."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtpu.config.validate import MESH_AXES
from jaxtpu.errors import ConfigError


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over `devices`, neighbours on the torus being neighbours on the inner axes.

    Several slices are joined along the outermost axes, so that only those use the data-centre
    network.

    Args:
      sizes: devices along each axis of `MESH_AXES`; their product is the number of devices.
      devices: default all devices of all processes; compile-only devices work as well.

    Raises:
      ConfigError: the slices cannot be laid along the outermost axes.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    assert math.prod(shape) == len(devices), (sizes, len(devices))
    slices = sorted({getattr(device, "slice_index", 0) for device in devices})
    if devices[0].platform == "tpu" and len(slices) > 1:
        grid = _multi_slice_grid(shape, len(slices), devices)
    else:
        grid = _torus_grid(shape, devices)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def has_host_memory(mesh: Mesh | AbstractMesh) -> bool:
    """Whether programs can keep arrays in the memory of the devices' host: those of TPUs can.

    A mesh without devices stands for one of TPUs.
    """
    return isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform == "tpu"


def _torus_grid(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    """`mesh_utils` lays axes along those of the torus; where it cannot (fsdp 64 x tensor 4 on
    16 x 16 chips), along parts of them."""
    try:
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _multi_slice_grid(
    shape: tuple[int, ...], num_slices: int, devices: list[jax.Device]
) -> np.ndarray:
    """Each slice laid out by itself, then joined along the outermost axes."""
    across = _slices_per_axis(shape, num_slices)
    within = tuple(size // factor for size, factor in zip(shape, across, strict=True))
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(device.slice_index, []).append(device)
    grids = np.stack([_torus_grid(within, by_slice[index]) for index in sorted(by_slice)])
    grids = grids.reshape(*across, *within)
    rank = len(shape)
    interleaved = [axis for dim in range(rank) for axis in (dim, dim + rank)]
    return grids.transpose(interleaved).reshape(shape)


def _slices_per_axis(shape: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    """How many slices each axis spans: the outermost axes first."""
    left, across = num_slices, []
    for size in shape:
        factor = math.gcd(size, left)
        across.append(factor)
        left //= factor
    if left > 1:
        raise ConfigError(
            "mesh.data", shape[0],
            f"{num_slices} slices must be divided over the outermost mesh axes {MESH_AXES}.",
            f"Use mesh.data={num_slices}.",
        )  # fmt: skip
    return tuple(across)


def peak_memory_bytes(devices: Sequence[jax.Device]) -> int | None:
    """The largest peak of device memory so far over this process's `devices`; None if unknown."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None
