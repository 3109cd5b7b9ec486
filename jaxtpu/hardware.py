"""What each TPU generation is, and which slices of it can be had: sizes, rates, shapes.

Every figure names its source beside it; a figure without a source is None. HBM limits are what the
compiler (libtpu 0.0.42.1) says it has, when a program asks for more.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from jaxtpu.errors import ConfigError, nearest

# Sources, as the comments below call them:
#   Cloud    https://docs.cloud.google.com/tpu/docs/NAME, the vendor's page of the generation
#   Book     https://jax-ml.github.io/scaling-book/tpus, "How to Think About TPUs"
#   JAX      jax/_src/pallas/mosaic/tpu_info.py of JAX 0.10.2
#   CACM     Jouppi et al., A Domain-Specific Supercomputer for Training DNNs, CACM 63(7), 2020
#   TPUv4    Jouppi et al., TPU v4, ISCA 2023, https://arxiv.org/abs/2304.01433
#   SkyPilot github.com/skypilot-org/skypilot, sky/clouds/gcp.py, and the price list of its catalogue
#   GKE      https://docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
# CACM and TPUv4 are unconfirmed: no copy of them was at hand when the table was written.
# Chips. Google's xpk lists all default shapes of v5p and 7x up to 4x4x244, and none longer.
_LONGEST_3D_AXIS = 256


@dataclass(frozen=True)
class Generation:
    """One TPU generation. A device is what JAX calls one: a core on v2, v3 and 7x, else a chip.

    Attributes:
      device_kinds: what `jax.Device.device_kind` may say.
      cores_per_chip, devices_per_chip: TensorCores and JAX devices on a chip.
      torus_dims: axes of the network between chips.
      sizes: chips in each slice that the vendor offers.
      hbm_gib: physical memory of a device, GiB.
      hbm_limit_gib: what the compiler lets one program use of it, GiB.
      default_budget_gib: what plans may use of it unless told otherwise, GiB.
      peak_flops_bf16: FLOP/s of a device.
      clock_hz: the clock that the compiler's cycle estimates are in.
      hbm_bandwidth: bytes/s of a device.
      ici_link_bandwidth: bytes/s of one link between chips, one way.
      dcn_bandwidth: bytes/s of a host of `chips_per_host` chips, to other slices.
      vmem_bytes: vector memory of a TensorCore.
      mxu_size: edge of a matrix unit.
      chips_per_host: chips of a virtual machine, hence of a JAX process, of a larger slice.
      host_memory_gib: memory of such a machine, GiB; one of twice the chips has twice as much.
      largest_host: chips of the largest single machine; a slice up to this size has one host.
      compiler_name: prefix of libtpu's topology names, where it is not `name`.
      compiler_options: of libtpu (name, value), for every program.
      chip_config: libtpu's `chip_config_name`, where its default is not what JAX runs with.
    """

    name: str
    device_kinds: tuple[str, ...]
    cores_per_chip: int
    devices_per_chip: int
    torus_dims: int
    sizes: tuple[int, ...]
    hbm_gib: float
    hbm_limit_gib: float | None
    default_budget_gib: float
    peak_flops_bf16: float
    hbm_bandwidth: float
    vmem_bytes: int
    ici_link_bandwidth: float | None = None
    dcn_bandwidth: float | None = None
    clock_hz: float | None = None
    mxu_size: int = 128  # Book
    chips_per_host: int = 4
    host_memory_gib: float | None = None
    largest_host: int = 4
    compiler_name: str | None = None
    chip_config: str | None = None
    compiler_options: tuple[tuple[str, str], ...] = ()

    @property
    def ici_links(self) -> int:
        """Links of a chip: one in both directions of every axis."""
        return 2 * self.torus_dims

    @property
    def offered(self) -> dict[int, tuple[int, ...]]:
        """The vendor's slices, smallest first: TensorCores to the default shape in chips."""
        shape = _rectangle if self.torus_dims == 2 else _cuboid
        return {chips * self.cores_per_chip: shape(chips) for chips in self.sizes}


def _rectangle(chips: int) -> tuple[int, int]:
    """A square, or two of them, for a power of two."""
    rows = 2 ** ((chips.bit_length() - 1) // 2)
    return rows, chips // rows


def _cuboid(chips: int) -> tuple[int, int, int]:
    """The shape nearest to a cube, made of 4x4x4 blocks from 64 chips on."""
    small = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips in small:
        return small[chips]
    blocks = chips // 64
    pairs = [(a, b) for a in range(1, blocks + 1) for b in range(a, blocks // a + 1)]
    shapes = [(a, b, blocks // (a * b)) for a, b in pairs if blocks % (a * b) == 0]
    a, b, c = sorted(min(shapes, key=sum))
    return 4 * a, 4 * b, 4 * c


def _block_sizes(most: int) -> tuple[int, ...]:
    """Sizes of a 3D torus: within one 4x4x4 block, or whole blocks up to `most` chips."""
    blocks = range(64, most + 1, 64)
    return (4, 8, 16, 32, *(n for n in blocks if _cuboid(n)[2] <= _LONGEST_3D_AXIS))


# Products windowed over collectives, libtpu's default on v5e and v6e, double the predicted time of
# configs/lm_1b.py: v5e-16 (fsdp 16, full) 0.787 s with, 0.385 without; v6e-8 0.645, 0.311 s.
_NO_WINDOWS = (("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),)

# One argument a line would hide the table.
# fmt: off
_TABLE = (
    Generation(
        "v2", ("TPU v2",), cores_per_chip=2, devices_per_chip=2, torus_dims=2,
        sizes=(4, 16, 64, 128, 256),  # SkyPilot; torch_xla/_internal/tpu.py has the same
        hbm_gib=8.0, hbm_limit_gib=7.48, default_budget_gib=7.48,
        peak_flops_bf16=22.5e12,  # unconfirmed: Cloud/v2 was not found; JAX: 23e12
        clock_hz=700e6, ici_link_bandwidth=62e9,  # CACM: 496 Gbit/s a link
        hbm_bandwidth=358e9, vmem_bytes=16 * 2**20,  # JAX
        host_memory_gib=334,  # SkyPilot
    ),
    Generation(
        "v3", ("TPU v3",), cores_per_chip=2, devices_per_chip=2, torus_dims=2,  # Cloud
        sizes=(4, 16, 32, 64, 128, 256, 512, 1024),  # as for v2
        hbm_gib=16.0, hbm_limit_gib=15.48,  # Cloud: 32 GiB a chip
        default_budget_gib=8.0,  # half a core: the promise of this project, not a limit of the chip
        peak_flops_bf16=61.5e12,  # Cloud: 123 TFLOP/s a chip; Book and JAX: 140
        clock_hz=940e6, vmem_bytes=16 * 2**20,  # CACM; JAX
        hbm_bandwidth=450e9,  # Cloud and Book: 900 GB/s a chip; JAX: 825
        # Cloud: all-reduce of a pod 340 TB/s, over 1024 chips of 4 links; CACM: 656 Gbit/s, the
        # same. Book has 100e9, and so does Cloud's bisection of 6.4 TB/s over 64 links.
        ici_link_bandwidth=83e9,
        host_memory_gib=334,  # SkyPilot
    ),
    Generation(
        "v4", ("TPU v4",), cores_per_chip=2, devices_per_chip=1, torus_dims=3,  # Cloud
        sizes=_block_sizes(4096), chip_config="megacore",  # Cloud: 4096 chips a pod
        hbm_gib=32.0, hbm_limit_gib=30.75, default_budget_gib=30.75,  # Cloud
        peak_flops_bf16=275e12, hbm_bandwidth=1200e9,  # Cloud
        clock_hz=1050e6, vmem_bytes=16 * 2**20,  # TPUv4; JAX
        ici_link_bandwidth=45e9,  # Book; Cloud agrees: all-reduce 1.1 PB/s, 4096 chips of 6 links
        dcn_bandwidth=25e9,  # Book: 6.25e9 a chip
        host_memory_gib=400,  # SkyPilot
    ),
    Generation(
        "v5e", ("TPU v5 lite", "TPU v5e"), cores_per_chip=1, devices_per_chip=1, torus_dims=2,
        sizes=(1, 4, 8, 16, 32, 64, 128, 256), largest_host=8,  # Cloud
        compiler_options=_NO_WINDOWS,
        hbm_gib=16.0, hbm_limit_gib=15.75, default_budget_gib=15.75,  # Cloud
        peak_flops_bf16=197e12, hbm_bandwidth=819e9,  # Cloud
        clock_hz=1500e6, vmem_bytes=128 * 2**20,  # Book; JAX
        ici_link_bandwidth=50e9,  # Cloud: 400 GB/s a chip, both ways, 4 ports; Book: 45e9
        dcn_bandwidth=12.5e9,  # Cloud: 2 x 100 Gbit/s for 8 chips
        host_memory_gib=192,  # Cloud; 8 chips: 384
    ),
    Generation(
        "v5p", ("TPU v5", "TPU v5p"), cores_per_chip=2, devices_per_chip=1, torus_dims=3,
        sizes=_block_sizes(6144),  # Cloud: the largest job, in a pod of 8960
        hbm_gib=95.0, hbm_limit_gib=95.74, default_budget_gib=95.0,  # Cloud; JAX: 96
        peak_flops_bf16=459e12, hbm_bandwidth=2765e9,  # Cloud; JAX: 2460e9
        clock_hz=1750e6, vmem_bytes=64 * 2**20,  # Book; JAX
        ici_link_bandwidth=100e9,  # Cloud: 1200 GB/s a chip, both ways, 6 links; Book: 90e9
        dcn_bandwidth=25e9,  # Cloud: 50 Gbit/s a chip
        host_memory_gib=448,  # GKE, unconfirmed: no copy with this row was at hand
    ),
    Generation(
        "v6e", ("TPU v6 lite", "TPU v6e"), cores_per_chip=1, devices_per_chip=1, torus_dims=2,
        sizes=(1, 4, 8, 16, 32, 64, 128, 256), largest_host=8, mxu_size=256,  # Cloud
        compiler_options=_NO_WINDOWS,
        hbm_gib=32.0, hbm_limit_gib=31.25, default_budget_gib=31.25,  # Cloud
        peak_flops_bf16=918e12, hbm_bandwidth=1638e9,  # Cloud
        clock_hz=1750e6,  # unconfirmed; the peak is 4 * 2 * 256**2 operations a cycle of it
        ici_link_bandwidth=100e9,  # Cloud: 800 GB/s a chip, both ways, 4 ports; Book: 90e9
        dcn_bandwidth=50e9,  # Cloud: 4 x 200 Gbit/s for 8 chips
        vmem_bytes=128 * 2**20,  # JAX
        host_memory_gib=720,  # GKE; 8 chips: 1440
    ),
    Generation(
        "v7x", ("TPU7x",), cores_per_chip=2, devices_per_chip=2, torus_dims=3,  # Cloud
        sizes=(1, *_block_sizes(9216)), compiler_name="tpu7x",  # Cloud
        hbm_gib=96.0, hbm_limit_gib=94.75, default_budget_gib=94.75,  # Cloud: 192 GiB a chip
        peak_flops_bf16=1153.5e12, hbm_bandwidth=3690e9,  # Cloud: 2307 TFLOP/s, 7380 GB/s a chip
        ici_link_bandwidth=100e9,  # Cloud: 1200 GB/s a chip, both ways, 6 links
        dcn_bandwidth=50e9,  # Cloud: 100 Gbit/s a chip
        vmem_bytes=64 * 2**20, mxu_size=256,  # JAX
        host_memory_gib=960,  # GKE
    ),
)
# fmt: on
GENERATIONS = {generation.name: generation for generation in _TABLE}
ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x", "7x": "v7x", "ironwood": "v7x"}


def generation_of(device_kind: str) -> Generation | None:
    """The generation that JAX calls `device_kind`; None for another platform or an unknown TPU."""
    return next((g for g in GENERATIONS.values() if device_kind in g.device_kinds), None)


@dataclass(frozen=True)
class Slice:
    """Chips joined by ICI; or several slices of one shape, joined by the data centre network."""

    name: str  # as the user wrote it, in lower case
    generation: Generation
    topology: tuple[int, ...]  # of one slice, in chips
    slices: int = 1

    @property
    def chips(self) -> int:
        """In all slices, as are `devices` and `hosts`."""
        return math.prod(self.topology) * self.slices

    @property
    def devices_per_slice(self) -> int:
        return math.prod(self.topology) * self.generation.devices_per_chip

    @property
    def devices(self) -> int:
        return self.devices_per_slice * self.slices

    @property
    def hosts(self) -> int:
        """Virtual machines, each with one JAX process."""
        per_slice = math.prod(self.topology)
        one = per_slice <= self.generation.largest_host
        return self.slices * (1 if one else per_slice // self.generation.chips_per_host)

    @property
    def topology_name(self) -> str:
        """First argument of `jax.experimental.topologies.get_topology_desc`."""
        prefix = self.generation.compiler_name or self.generation.name
        return f"{prefix}:{'x'.join(map(str, self.topology))}"

    @property
    def topology_kwargs(self) -> dict[str, Any]:
        """Its other arguments. libtpu takes a host for 2x2x1 chips unless told otherwise."""
        kwargs: dict[str, Any] = {}
        host = (*self.topology, 1)[:3]
        if self.hosts == self.slices and host != (2, 2, 1):
            kwargs["chips_per_host_bounds"] = host
        if self.generation.chip_config:
            kwargs["chip_config_name"] = self.generation.chip_config
        if self.slices > 1:
            kwargs["num_slices"] = self.slices
        return kwargs


_PREFIXES = "|".join([*GENERATIONS, *ALIASES])
_NAME = re.compile(rf"(?:([1-9]\d*)x)?({_PREFIXES})(?:-(\d+)|:(\d+(?:x\d+)+))")


def parse_slice(name: str, field: str = "slice") -> Slice:
    """Reads `v3-32` (TensorCores), `v3:4x4` (chips), or several slices of either: `2xv3-32`.

    The number counts TensorCores on every generation, as the vendor has it. On v5e and v6e a chip
    has one; `tpu7x-8` is 4 chips of two in Google's xpk and in its examples of `gcloud`.

    Args:
      field: what the user calls this setting, for the ConfigError of a name that is not one.
    """
    written = name.strip().lower()
    match = _NAME.fullmatch(written)
    if not match:
        problem = "not a TPU slice: write TensorCores (v3-32) or a shape in chips (v3:4x4)."
        raise ConfigError(field, name, problem, nearest(name, [f"{g}-8" for g in GENERATIONS]))
    slices, prefix, cores, shape = match.groups()
    generation = GENERATIONS[ALIASES.get(prefix, prefix)]
    offered = generation.offered
    if shape:
        topology = tuple(map(int, shape.split("x")))
        wanted = math.prod(topology) * generation.cores_per_chip
        problem = _shape_problem(generation, topology)
    else:
        wanted = int(cores)
        topology = offered.get(wanted, ())
        problem = "" if topology else f"the vendor has no {generation.name} slice of {cores} cores."
    if problem:
        near = [n for n in offered if n <= wanted][-1:] + [n for n in offered if n > wanted][:1]
        names = " or ".join(f"{prefix}-{n}" for n in near)
        raise ConfigError(field, name, problem, f"Use {names}.")
    return Slice(written, generation, topology, int(slices or 1))


def _shape_problem(generation: Generation, topology: tuple[int, ...]) -> str:
    """Why there is no such slice; empty where there may be one. libtpu itself takes any shape."""
    shapes = generation.offered.values()
    if len(topology) != generation.torus_dims:
        return f"a {generation.name} shape has {generation.torus_dims} axes."
    if max(topology) > max(map(max, shapes)) or math.prod(topology) > max(generation.sizes):
        return f"larger than any {generation.name} slice."
    if topology not in shapes and (min(topology) < 1 or topology[0] % 2 or topology[1] % 2):
        return "the 2x2 chips of a host do not tile this shape."
    return ""
