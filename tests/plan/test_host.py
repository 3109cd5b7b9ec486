"""Host RAM and checkpoint memory, against what Orbax itself says that it writes."""

import dataclasses
import json

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization.replica_slices import get_replica_slices

from jaxtpu.config import finalize, run_units
from jaxtpu.hardware import parse_slice
from jaxtpu.observe.memory import tree_bytes_per_device
from jaxtpu.plan import host
from jaxtpu.plan.host import HostMemory, abstract_arguments, device_memory, host_memory
from tests.tiny import VOCABULARY, programs_on, tiny_config

MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"data": 8}]


@pytest.mark.parametrize("sizes", MESHES)
def test_a_process_writes_what_orbax_says(sizes):
    programs = programs_on(sizes, sharding={"max_replicated": 1.0})
    arrays = jax.tree.leaves(programs.init())
    slices = [get_replica_slices(array, 0, use_replica_parallel=True) for array in arrays]
    copied = sum(found.nbytes for found in slices)
    arguments = (programs.abstract_state, programs.abstract_batch)
    made = host_memory(*arguments, parse_slice("v3-8"))
    assert made.checkpoint == round(copied * (1 + host._ENCODED))
    cut = [  # slices of a device, which it holds beside the state
        found.nbytes // 8
        for found in slices
        if found.replica_slices and found.replica_slices[0].slice_args
    ]
    state = tree_bytes_per_device(programs.abstract_state)
    devices = device_memory(*arguments, prefetch=2)
    assert devices.restore == state
    assert devices.ready_batches == 3 * tree_bytes_per_device(programs.abstract_batch)
    assert devices.save == state + sum(cut) + devices.ready_batches


def test_arguments_without_devices():
    config = tiny_config()
    config.data.batch_size = 32
    config.mesh.update({"data": 4, "fsdp": 8, "tensor": 1})
    sizes = finalize(config, 32, VOCABULARY)
    state, batch = abstract_arguments(config, sizes, run_units(config, 1000))
    small = host_memory(state, batch, parse_slice("v3-32"))
    large = host_memory(state, batch, parse_slice("v3-32"), offloaded_bytes=100, examples=1000)
    assert large.offloaded == 800  # eight devices a host
    assert large.loader == small.loader + 3 * 8 * 1000
    assert small.available is None and small.fits is None


def test_offloaded_state_is_counted_without_the_compiler_too():
    config = tiny_config(optimizer={"placement": "host"})
    sizes = finalize(config, 8, VOCABULARY)
    state, batch = abstract_arguments(config, sizes, run_units(config, 1000))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]
    there = [leaf for leaf in moments if leaf.sharding.memory_kind == "pinned_host"]
    assert len(there) == 2 * 9  # two of seven matrices of the layers, of the table and the head
    made = host_memory(state, batch, parse_slice("v3-8"))
    assert made.offloaded == 8 * tree_bytes_per_device(there)


def test_state_on_the_host_takes_no_hbm():
    mesh = programs_on({"fsdp": 8}).mesh
    leaf = lambda spec, **kind: jax.ShapeDtypeStruct(  # noqa: E731
        (16, 8), "float32", sharding=NamedSharding(mesh, spec, **kind)
    )
    state = [leaf(P("fsdp")), leaf(P("fsdp"), memory_kind="pinned_host")]
    assert device_memory(state, [], prefetch=1).restore == 64
    assert device_memory([leaf(P())], [], prefetch=1).save == 512 + 512 // 8


def test_the_total_is_that_of_a_save_or_of_the_restore():
    memory = HostMemory(1, 2, 4, checkpoint=8, loader=16, restore=20, available=31)
    assert memory.total == 1 + 2 + 4 + 24 and memory.fits
    memory = dataclasses.replace(memory, restore=25)
    assert memory.total == 32 and not memory.fits
    assert json.loads(json.dumps(memory.to_json()))["total"] == 32
