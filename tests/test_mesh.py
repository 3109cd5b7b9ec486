"""Meshes on emulated devices, and on those of several slices."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxtpu.config.validate import MESH_AXES
from jaxtpu.errors import ConfigError
from jaxtpu.hardware import parse_slice
from jaxtpu.mesh import _multi_slice_grid, _slices_per_axis, make_mesh
from jaxtpu.plan.compiler import slice_devices


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """As much of a TPU device as the multi-slice layout looks at."""

    id: int
    slice_index: int
    platform: str = "cpu"
    device_kind: str = "fake"
    process_index: int = 0


def test_every_axis_is_there_and_every_device_once():
    mesh = make_mesh({"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2})
    assert mesh.axis_names == MESH_AXES
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())


def test_slices_lie_along_the_outermost_axes():
    devices = [SliceDevice(id, id // 8) for id in range(16)]
    grid = _multi_slice_grid((2, 4, 1, 1, 2), 2, devices)
    assert {d.slice_index for d in grid[0].flat} == {0}
    assert {d.slice_index for d in grid[1].flat} == {1}


def test_an_axis_takes_the_slices_that_the_outer_ones_leave():
    assert _slices_per_axis((2, 8, 1, 1, 2), 4) == (2, 2, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"mesh\.data=3"):
        _slices_per_axis((1, 8, 1, 1, 1), 3)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_axes_that_no_side_of_the_torus_has_lie_along_parts_of_its_sides(axis):
    """Devices in the order of their ids would be 4 to 9 links apart along `fsdp`."""
    sizes = {"data": 2, "fsdp": 16, "expert": 1, "context": 1, "tensor": 8}
    mesh = make_mesh(sizes, slice_devices(parse_slice("v5e-256")))
    assert len({device.id for device in mesh.devices.flat}) == 256
    lines = np.moveaxis(mesh.devices, MESH_AXES.index(axis), -1).reshape(-1, sizes[axis])
    links = [
        sum(min((a - b) % 16, (b - a) % 16) for a, b in zip(one.coords, other.coords, strict=True))
        for line in lines
        for one, other in itertools.pairwise(line)
    ]
    assert np.mean(links) <= {"data": 8, "fsdp": 1, "tensor": 1}[axis]
