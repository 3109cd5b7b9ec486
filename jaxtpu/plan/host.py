"""What a run needs beside its compiled programs, by arithmetic: host RAM, and HBM of checkpoints.

None of it comes from the TPU compiler, and every figure is labelled so. A process (one per host)
holds the copy of the state that an asynchronous save writes from, offloaded state, batches, and
itself. The token cache is a file mapped into memory: the kernel may drop its pages, so it needs
none. Devices hold, while a checkpoint is read or written:

- restore: the state. Orbax 0.12.8 reads each shard into host memory, casts it there, and puts it
  on its device once (`serialization._read_array_index_and_device_put`); nothing is moved after.
- save: the state, and a slice of each array that several devices hold whole. Orbax shares the
  writing among the R replicas of a shard: each cuts out 1/R of it on its device, all arrays at
  once, before the copies to the host are awaited (`replica_slices.transfer_arrays_to_host`).
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxtpu.config import Config, RunUnits
from jaxtpu.config.validate import MESH_AXES
from jaxtpu.hardware import Slice
from jaxtpu.train.programs import build_programs

# Resident memory after `import jaxtpu.trainer`, TensorFlow and `jax.devices()`: 782 MiB (VmRSS in
# /proc/self/status; jax 0.10.2, TensorFlow 2.21); libtpu, once it has a topology: 100 MiB more.
PROCESS_BYTES = 882 * 2**20
# What lowering and compiling the train step of configs/lm_1b.py for a v3-8 adds to that, by
# ru_maxrss; nearly all of it stays. jax 0.10.2: 1278 MiB, 0.12.0.1: 1358 MiB.
COMPILER_BYTES = 1358 * 2**20
# Beside the copy of the state: chunks that TensorStore has compressed and not yet written. Growth
# of RssAnon during a save of 1.5 GiB of random float32, where CPU devices need no copy: 0.86.
_ENCODED = 0.86
# Growth of RssAnon beyond the restored arrays themselves, for the same state: 0.56 of it.
_DECODED = 0.56
_RESTORE_LIMIT = 96 * 10**9  # bytes that Orbax reads at a time: `restore_concurrent_gb`
_HOST_BATCHES = 5  # data/prefetch.py: two being made, two made, one on its way to the devices
_EPOCH_ORDERS = 3  # data/loader.py keeps so many, int64 an example


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """RAM of one process of a run, bytes, by arithmetic.

    Attributes:
      process: the interpreter, JAX, TensorFlow and libtpu.
      compiler: what compiling leaves behind.
      offloaded: state in pinned host memory, of all local devices.
      checkpoint: a save under way: the copy that it writes from, and what is encoded of it.
      loader: batches made ahead, the order of the examples, and token files as far as they are
        mapped into memory.
      restore: shards being read at the start, before there are batches or a save.
      available: of the host; None where that is not known.
    """

    process: int
    compiler: int
    offloaded: int
    checkpoint: int
    loader: int
    restore: int
    available: int | None

    @property
    def total(self) -> int:
        """The most that is needed at once: during a save, or during the restore."""
        return self.process + self.compiler + self.offloaded + max(
            self.checkpoint + self.loader, self.restore
        )  # fmt: skip

    @property
    def fits(self) -> bool | None:
        """Whether the host has as much; None where its size is not known."""
        return None if self.available is None else self.total <= self.available

    def to_json(self) -> dict:
        """Everything, as JSON values."""
        return dataclasses.asdict(self) | {"total": self.total, "fits": self.fits}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """HBM of one device that no compiled program counts, bytes, by arithmetic.

    Attributes:
      restore: while a checkpoint is read: the state.
      save: while one is written: the state, slices of what several devices hold, ready batches.
      ready_batches: batches that wait on the device for their step, also beside the train program.
    """

    restore: int
    save: int
    ready_batches: int

    def to_json(self) -> dict:
        """Everything, as JSON values."""
        return dataclasses.asdict(self)


def abstract_arguments(config: Config, sizes: dict[str, int], units: RunUnits) -> tuple[Any, Any]:
    """(state, batch) of `jax.ShapeDtypeStruct`s with shardings, without any device.

    Args:
      config: finalized.
      sizes: of the mesh's axes, as `Candidate.sizes`.
      units: of the run.

    Raises:
      ConfigError: too much of the model would be replicated.
    """
    shape, types = tuple(sizes[a] for a in MESH_AXES), (AxisType.Auto,) * len(MESH_AXES)
    programs = build_programs(config, AbstractMesh(shape, MESH_AXES, axis_types=types), units)
    return programs.abstract_state, programs.abstract_batch


def host_memory(
    state: Any,
    batch: Any,
    slice_: Slice,
    *,
    offloaded_bytes: int | None = None,
    examples: int | None = None,
    mapped_bytes: int = 0,
    host_memory_gib: float | None = None,
) -> HostMemory:
    """RAM that one process of a run needs.

    Args:
      state, batch: as `abstract_arguments` gives them.
      slice_: its hosts run a process each.
      offloaded_bytes: `CompileResult.host_bytes` of the train program: of one device. Without the
        compiler, None: what of the state is there.
      examples: in the training data; None where that is not known, and then not counted.
      mapped_bytes: `data.cache_gib`, the most that token files take while they are read.
      host_memory_gib: RAM of a host; None where that is not known.
    """
    local = slice_.devices // slice_.hosts
    leaves = [_Leaf.of(leaf) for leaf in jax.tree.leaves(state)]
    batches = sum(_Leaf.of(leaf).read(local) for leaf in jax.tree.leaves(batch))
    if offloaded_bytes is None:
        offloaded_bytes = sum(leaf.shard_bytes for leaf in leaves if leaf.on_host)
    read = min(sum(leaf.read(local) for leaf in leaves), _RESTORE_LIMIT)
    return HostMemory(
        process=PROCESS_BYTES,
        compiler=COMPILER_BYTES,
        offloaded=offloaded_bytes * local,
        checkpoint=round(sum(leaf.written(local) for leaf in leaves) * (1 + _ENCODED)),
        loader=_HOST_BATCHES * batches + 8 * _EPOCH_ORDERS * (examples or 0) + mapped_bytes,
        restore=round(read * (1 + _DECODED)),
        available=None if host_memory_gib is None else round(host_memory_gib * 2**30),
    )


def device_memory(state: Any, batch: Any, prefetch: int) -> DeviceMemory:
    """HBM of checkpoints and of batches that wait.

    Args:
      state, batch: as `abstract_arguments` gives them.
      prefetch: `data.prefetch`, batches kept ready; one more is on its way.
    """
    leaves = [_Leaf.of(leaf) for leaf in jax.tree.leaves(state)]
    held = sum(leaf.shard_bytes for leaf in leaves if not leaf.on_host)
    sliced = sum(leaf.shard_bytes // leaf.writers for leaf in leaves if leaf.writers > 1)
    ready = (prefetch + 1) * sum(_Leaf.of(leaf).shard_bytes for leaf in jax.tree.leaves(batch))
    return DeviceMemory(restore=held, save=held + sliced + ready, ready_batches=ready)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array of the state.

    Attributes:
      shard_bytes: of a device's part.
      parts: different parts, of all devices.
      writers: devices that share the writing of a part; 1: one of them writes all of it.
      on_host: whether it lies in host memory.
    """

    shard_bytes: int
    parts: int
    writers: int
    on_host: bool

    @classmethod
    def of(cls, leaf: jax.ShapeDtypeStruct) -> "_Leaf":
        """Of an abstract array with its sharding."""
        shard = leaf.sharding.shard_shape(leaf.shape)
        size = math.prod(shard) * leaf.dtype.itemsize
        whole = math.prod(leaf.shape) * leaf.dtype.itemsize
        parts = whole // size if size else 1
        replicas = math.prod(leaf.sharding.mesh.axis_sizes) // parts
        # Orbax cuts the first dimension that the replicas divide; without one, replica 0 writes.
        shared = any(length % replicas == 0 for length in shard) and size > 0
        on_host = leaf.sharding.memory_kind == "pinned_host"
        return cls(size, parts, replicas if shared else 1, on_host)

    def written(self, local: int) -> int:
        """Bytes of it that one process of `local` devices writes at most."""
        if self.writers > 1:
            return self.shard_bytes * local // self.writers
        return self.read(local)

    def read(self, local: int) -> int:
        """Bytes of it that one process reads: a part that several of its devices hold, once."""
        return self.shard_bytes * min(self.parts, local)
