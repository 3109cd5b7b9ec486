"""Meshes on emulated devices, and on those of several slices."""

import dataclasses

import jax
import pytest

from jaxtpu.config.validate import MESH_AXES
from jaxtpu.errors import ConfigError
from jaxtpu.mesh import _multi_slice_grid, _slices_per_axis, make_mesh


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
