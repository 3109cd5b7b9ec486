"""Collectives of a scheduled program: who takes part, how many bytes, for how long.

The compiler gives no cycles for them. Here a collective takes the bytes that its algorithm sends
over the busiest link, at the link's rate, and a latency. What is assumed:

- Partitions stand in the order of the mesh, as `jaxtpu.mesh` lays them: on v2, v3 and 7x the
  partitions 2k and 2k + 1 are the cores of one chip, a group forms a ring of neighbours, and a
  slice's partitions follow one another.
- A group of both cores of each chip sends everything once over each link of the ring and passes it
  on inside the chip at no cost; a group of one core a chip shares the chip's links with the other.
- A group within one chip uses no link: its bytes move at the rate of HBM.
- An axis of chips has links at its ends too (a torus) where it spans the whole pod (v2, v3, v5e,
  v6e) or is a multiple of four (v4, v5p, 7x); elsewhere a chip at the corner has one link an axis.
- Groups across slices send at the host's data-centre rate, shared by the host's devices.
"""

import collections
import dataclasses
import functools
import math
import re

import numpy as np

from jaxtpu.hardware import Generation, Slice
from jaxtpu.plan.hlo import Instruction

# The physical constants of communication; the same for every generation.
# Share of a link's rate that is data. Fitted by `run.py plan --validate` to published speeds: the
# best of 0.4 to 0.9. The speeds say little more than that it is high: with 0.7 the mean error is
# one point larger.
LINK_EFFICIENCY = 0.9
# Start and barrier of one collective. Assumed: the published programs are large, and between 1 and
# 20 microseconds their mean error changes by a tenth of a point.
COLLECTIVE_SECONDS = 5e-6
HOP_SECONDS = 1e-6  # from chip to chip: https://jax-ml.github.io/scaling-book/sharding
DCN_BYTES_PER_SECOND = 12.5e9  # a host's, where the vendor publishes none (v2, v3): 100 Gbit/s

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_STRATEGY = re.compile(r"(\w*Strategy\w*)\{colors:(\d+) phases:(\d+)")
_AXES_OF_EMITTER = re.compile(r"(\d)D")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>[^)]*(?:\([^)]*\))?)\))? \{(?P<used>.*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_BRACES = re.compile(r"\{([\d, ]*)\}")


@dataclasses.dataclass(frozen=True)
class Network:
    """The fitted constants of communication, as values: a fit tries others.

    Attributes:
      link_efficiency, collective_seconds: LINK_EFFICIENCY, COLLECTIVE_SECONDS.
    """

    link_efficiency: float = LINK_EFFICIENCY
    collective_seconds: float = COLLECTIVE_SECONDS


NETWORK = Network()


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, of one device.

    Attributes:
      kind: one of KINDS, or `dcn` for what the runtime sends to other slices.
      bytes: the full result of an all-gather, the full operand of all others.
      group_size: devices that take part together.
      seconds: of one run, alone on its links.
      lane: those that have it in common wait for one another.
      op_name: path of the JAX operation.
    """

    kind: str
    bytes: int
    group_size: int
    seconds: float
    lane: str
    op_name: str


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices of the largest group.

    Attributes:
      size: devices.
      chips: that they are on.
      slices: that they are on.
    """

    size: int
    chips: int
    slices: int


def make_collective(
    kind: str,
    instruction: Instruction,
    operand_bytes: int,
    config: dict,
    slice_: Slice,
    network: Network = NETWORK,
) -> Collective:
    """The collective that `instruction` states.

    Args:
      kind: one of KINDS.
      instruction: has `replica_groups` or `source_target_pairs`.
      operand_bytes: of a device, without padding.
      config: backend_config of the instruction that runs it (a fusion's own, for a fused one).
    """
    if kind == "collective-permute":
        text = instruction.attributes["source_target_pairs"]
        seconds, lane = _permute(parse_groups(text, 0), operand_bytes, slice_, network)
        lane = f"{lane} {text}"  # those that differ in any pair take other links
        return Collective(kind, operand_bytes, 2, seconds, lane, instruction.op_name)
    group = _group(groups_of(instruction, slice_.devices_per_slice), slice_)
    total = operand_bytes * group.size if kind == "all-gather" else operand_bytes
    seconds = _ring_seconds(kind, total, group, _strategy(config), slice_, network)
    lane = "dcn" if group.slices > 1 else "ici" if group.chips > 1 else "chip"
    return Collective(kind, total, group.size, seconds, lane, instruction.op_name)


def make_dcn_transfer(
    instruction: Instruction, operand_bytes: int, slice_: Slice, network: Network = NETWORK
) -> Collective:
    """A `send` of the multi-slice runtime, whose answer the `recv` of the same name brings."""
    ring = 2 * (slice_.slices - 1) / slice_.slices
    seconds = network.collective_seconds
    seconds += ring * operand_bytes / _dcn_bandwidth(slice_.generation)
    op_name = instruction.op_name
    return Collective("dcn", operand_bytes, slice_.slices, seconds, "dcn", op_name)


def groups_of(instruction: Instruction, devices: int) -> np.ndarray:
    """Groups (rows) of the partitions that `instruction` joins, of `devices` in all."""
    text = instruction.attributes.get("replica_groups", "{}")
    if "device_ids" in instruction.attributes:  # the second half of a mesh with its own order
        text += f", device_ids={instruction.attributes['device_ids']}"
    return parse_groups(text, devices)


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, devices: int) -> np.ndarray:
    """Groups (rows) written in one of HLO's three ways; groups of unequal size are padded by -1.

    `{{0,1},{2,3}}` lists them; `[2,4]<=[4,2]T(1,0)` transposes 0, 1, ... and cuts it into rows;
    `mesh['a'=4,'b'=2] {'a'}` joins the partitions along axes of a mesh. `{}` is one of them all.
    """
    if found := _MESH.fullmatch(text.strip()):
        return _mesh_groups(found["axes"], found["ids"], found["used"])
    if found := _IOTA.fullmatch(text.strip()):
        rows, dims, order = (_numbers(part) for part in found.groups(default=""))
        return _transposed(dims, order).reshape(rows)
    groups = [_numbers(part) for part in _BRACES.findall(text) if part.strip()]
    if not groups:
        return np.arange(devices).reshape(1, -1)
    longest = max(map(len, groups))
    return np.array([group + [-1] * (longest - len(group)) for group in groups])


def _mesh_groups(axes: str, ids: str | None, used: str) -> np.ndarray:
    """Groups along the axes `used`; a sub-axis `'a':(2)4` is the 4 inside the first 2 of `a`."""
    sizes = {name: int(size) for name, size, _, _ in _AXIS.findall(axes)}
    places = np.arange(math.prod(sizes.values()))
    if ids:
        dims, _, order = ids.strip("[]").partition("]T(")
        explicit = not ids.startswith("[")
        order = _numbers(order.rstrip(")"))
        places = np.array(_numbers(ids)) if explicit else _transposed(_numbers(dims), order)
    shape, joined = [], []
    parts = {name: (int(pre or 1), int(size or 0)) for name, _, pre, size in _AXIS.findall(used)}
    for name, size in sizes.items():
        before, inside = parts.get(name, (1, 1))
        inside = inside or size
        if name in parts:
            joined.append(len(shape) + 1)
        shape += [before, inside, size // before // inside]
    grid = np.moveaxis(places.reshape(shape), joined, range(-len(joined), 0))
    return grid.reshape(-1, math.prod(shape[axis] for axis in joined))


def _transposed(dims: list[int], order: list[int]) -> np.ndarray:
    grid = np.arange(math.prod(dims)).reshape(dims)
    return (grid.transpose(order) if order else grid).ravel()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _group(groups: np.ndarray, slice_: Slice) -> Group:
    """The first group; the compiler makes all alike."""
    members = groups[0][groups[0] >= 0]
    per_slice = slice_.devices_per_slice
    spans = lambda size: len(np.unique(members // size))  # noqa: E731
    return Group(len(members), spans(slice_.generation.devices_per_chip), spans(per_slice))


def _strategy(config: dict) -> tuple[int, int]:
    """(axes of the torus, one-way links) that the compiler's algorithm uses at a time.

    A colour of a `UniDirection...` strategy goes one way, a colour of any other both ways round. An
    all-gather tells its axes only (`1DAllGather...`), and takes both ways of each; so does
    everything else, along one axis, for want of better knowledge.
    """
    algorithm = config.get("collective_algorithm_config", {})
    if found := _STRATEGY.search(algorithm.get("debug", "")):
        name, colors, phases = found[1], int(found[2]), int(found[3])
        return phases, colors * (1 if name.startswith("UniDirection") else 2)
    found = _AXES_OF_EMITTER.match(algorithm.get("emitter", ""))
    axes = int(found[1]) if found else 1
    return axes, 2 * axes


def wraps(generation: Generation, length: int) -> bool:
    """Whether an axis of `length` chips is a ring.

    Sources: https://jax-ml.github.io/scaling-book/tpus (v5e, v6e: axes of 16), Cloud/v4 (multiples
    of four), Cloud/v5p (whole cubes of 4x4x4); for v2 and v3 the whole pod is assumed to be needed.
    """
    if generation.torus_dims == 3:
        return length % 4 == 0
    return length == max(max(shape) for shape in generation.offered.values())


def _links(axes: int, wanted: int, chips: int, slice_: Slice) -> int:
    """One-way links of a chip that work at a time: `wanted`, as far as there are any."""
    if axes == 1:  # a ring through neighbours, or the one link between two chips
        return min(wanted, 2 if chips > 2 else 1)
    lengths = [length for length in slice_.topology if length > 1]
    there = sum(2 if wraps(slice_.generation, length) else 1 for length in lengths)
    return max(1, min(wanted, there))


def _ring_seconds(
    kind: str,
    size: int,
    group: Group,
    strategy: tuple[int, int],
    slice_: Slice,
    network: Network,
) -> float:
    """Seconds of a collective of `size` bytes, as `Collective.bytes` counts them."""
    generation = slice_.generation
    moved = size * (group.size - 1) / max(group.size, 1) * (2 if kind == "all-reduce" else 1)
    if group.slices > 1:
        return network.collective_seconds + moved / _dcn_bandwidth(generation)
    if group.chips <= 1:
        return network.collective_seconds + moved / generation.hbm_bandwidth
    axes, wanted = strategy
    hops = axes * group.chips ** (1 / axes) / 2 * (2 if kind == "all-reduce" else 1)
    latency = network.collective_seconds + hops * HOP_SECONDS
    links = _links(axes, wanted, group.chips, slice_)
    sharing = generation.devices_per_chip * group.chips / group.size
    if kind == "all-to-all":  # each device's bytes cross a quarter of each axis' ring, on average
        axes = sum(length > 1 for length in slice_.topology)
        links, sharing = 2 * axes, generation.devices_per_chip
        moved *= axes * group.chips ** (1 / axes) / 4
    link = generation.ici_link_bandwidth * network.link_efficiency
    return latency + moved * sharing / (links * link)


def _permute(pairs: np.ndarray, size: int, slice_: Slice, network: Network) -> tuple[float, str]:
    """(seconds, network) of a permutation among neighbours; of a pair of chips that several devices
    send between, the link is shared."""
    generation = slice_.generation
    per_chip, per_slice = generation.devices_per_chip, slice_.devices_per_slice
    if any(source // per_slice != target // per_slice for source, target in pairs):
        return network.collective_seconds + size / _dcn_bandwidth(generation), "dcn"
    hops = [(source // per_chip, target // per_chip) for source, target in pairs]
    crossing = collections.Counter((a, b) for a, b in hops if a != b)
    if not crossing:
        return network.collective_seconds + size / generation.hbm_bandwidth, "chip"
    sent = size * max(crossing.values())
    link = generation.ici_link_bandwidth * network.link_efficiency
    return network.collective_seconds + HOP_SECONDS + sent / link, "ici"


def _dcn_bandwidth(generation: Generation) -> float:
    """Bytes/s of a device to other slices."""
    devices = generation.chips_per_host * generation.devices_per_chip
    return (generation.dcn_bandwidth or DCN_BYTES_PER_SECOND) / devices
