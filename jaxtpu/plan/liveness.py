"""A compiled program's memory over its schedule, its peak, and the buffers that make the peak.

The sum of live buffers is the compiler's `peak_memory_in_bytes` (without host memory), to within a
few KiB. What the device needs is more: code, which neither figure of the compiler counts; and what
packing the buffers leaves unused, which only `total_allocation_bytes` (jax 0.12) counts: 0% to 7%
were seen, and less where the budget is tight.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from jaxtpu.plan.buffer_names import OTHER, Naming, module_path, phase
from jaxtpu.plan.hlo import HBM, HOST, Module, trip_count
from jaxtpu.plan.live_ranges import LiveRanges, Value, live_ranges


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One piece of memory, live at the peak.

    Attributes:
      bytes: that it takes, padding included.
      untiled_bytes: without the padding of its dimensions to whole tiles.
      dtype: of its elements.
      dims: its dimensions.
      kind: parameter, output, gradient, saved activation, weight copy, collective, temporary, code.
      phase: forward, backward, or other (the optimizer; a program that is not differentiated).
      path: of its module, `decoder/layers/mlp/gate`; of parameters, weight copies and gradients
        that of the parameter, `params/decoder/layers/mlp/gate/kernel`, `opt_state/...`.
      op_name: the whole path of the JAX operation that makes it.
      source: `file:line` of that operation, outside installed packages where there is such a line.
      instruction: name of the HLO instruction that makes it.
    """

    bytes: int
    untiled_bytes: int
    dtype: str = ""
    dims: tuple[int, ...] = ()
    kind: str = "temporary"
    phase: str = "other"
    path: str = ""
    op_name: str = ""
    source: str = ""
    instruction: str = ""


@dataclasses.dataclass(frozen=True)
class Event:
    """Memory while one scheduled instruction runs.

    Attributes:
      instruction: its name in the HLO text.
      opcode: its opcode.
      path: module path; where its own name has none, of what it is made for; "" if unknown.
      phase: forward, backward or other; of an unnamed instruction, that of the one before.
      loops: names of the `while` instructions around it, outermost first.
      bytes: live in HBM, code included.
      host_bytes: live in pinned host memory.
    """

    instruction: str
    opcode: str
    path: str
    phase: str
    loops: tuple[str, ...]
    bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `while` loop: its events stand once in the timeline, from `first` to `last` (indices).

    Attributes:
      instruction: its name, by which events refer to it.
      path: module path.
      phase: forward, backward or other.
      first: index of the first event inside.
      last: index of the last event inside.
      trips: how often it runs; None if the text does not say.
    """

    instruction: str
    path: str
    phase: str
    first: int
    last: int
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Memory of one device while a program runs.

    Attributes:
      events: in the order of the schedule, each loop's body once.
      loops: in the order of the schedule, outer ones before inner ones.
      code_bytes: of the program itself, as given.
      peak_bytes: the most bytes live in HBM at once, code included.
      peak_index: of the event that has them.
      peak_buffers: live there, the largest first, the code among them; their bytes add up to it.
      peak_host_bytes: the most bytes live in pinned host memory at once.
    """

    events: tuple[Event, ...]
    loops: tuple[Loop, ...]
    code_bytes: int
    peak_bytes: int
    peak_index: int
    peak_buffers: tuple[Buffer, ...]
    peak_host_bytes: int


def timeline(module: Module, code_bytes: int = 0, outputs_reused: bool = False) -> Timeline:
    """The memory of `module`.

    Args:
      code_bytes: size of the program (`generated_code_size_in_bytes`), live throughout.
      outputs_reused: whether temporaries may lie in the memory of results that are not made yet
        (results whose parameter is not donated): libtpu 0.0.42 (jax 0.10) does this, 0.0.50
        (jax 0.12) does not.
    """
    ranges = live_ranges(module)
    memories = _memories(ranges, outputs_reused)
    hbm, host = _live_bytes(memories, HBM, ranges), _live_bytes(memories, HOST, ranges)
    naming = Naming(module, ranges)
    peak = max(range(len(hbm)), key=hbm.__getitem__)
    live = (memory for memory in memories if memory.space == HBM and memory.holds(peak))
    buffers = [buffer for memory in live for buffer in _buffers(memory, peak, naming)]
    if code_bytes:
        buffers.append(Buffer(code_bytes, code_bytes, kind="code"))
    return Timeline(
        events=tuple(_events(ranges, naming, hbm, host, code_bytes)),
        loops=tuple(_loops(module, ranges)),
        code_bytes=code_bytes,
        peak_bytes=hbm[peak] + code_bytes,
        peak_index=peak,
        peak_buffers=tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)),
        peak_host_bytes=max(host),
    )


@dataclasses.dataclass(eq=False)
class _Memory:
    """Values that share `size` bytes of `space`, taken during `spans` (first and last step).

    Those with another leader than `leader` are temporaries in the memory of a result.
    """

    leader: Value
    values: list[Value]
    space: int
    size: int
    spans: list[tuple[int, int]]

    def holds(self, step: int) -> bool:
        """Whether it is taken at `step`."""
        return any(first <= step <= last for first, last in self.spans)


def _memories(ranges: LiveRanges, outputs_reused: bool) -> list[_Memory]:
    """All memories; those of parameters and of results are held from start to end."""
    homes = _homes(ranges) if outputs_reused else {}
    for operand, result in ranges.ties:
        if operand.leader not in homes and result.leader not in homes:
            operand.share(result)
    sharing = defaultdict(list)
    for value in ranges.values:
        sharing[homes.get(value.leader, value).leader].append(value)
    parameters = {value.leader for values in ranges.parameters for value in values}
    outputs = {value.leader for value in ranges.results} - parameters
    memories = []
    for leader, values in sharing.items():
        size = max(value.shape.tiled_bytes for value in values)
        spans = _merged((value.start, value.end) for value in values)
        if leader in outputs or leader in parameters:
            spans = [(0, len(ranges.steps) - 1)]
        space = leader.shape.memory_space
        memories.append(_Memory(leader, values, space, size, spans))
    return memories


def _homes(ranges: LiveRanges) -> dict[Value, Value]:
    """Values of results in whose memory temporaries lie, as XLA's buffer assignment puts them.

    From the largest to the smallest, each goes into the smallest memory in which it is never live
    together with another: the last one so found of those of one size.
    """
    values = defaultdict(list)
    for value in ranges.values:
        values[value.leader].append(value)
    parameters = {value.leader for group in ranges.parameters for value in group}
    outputs = {value.leader for value in ranges.results} - parameters
    ties = {(id(operand), id(result)) for operand, result in ranges.ties}
    size = {leader: max(v.shape.tiled_bytes for v in group) for leader, group in values.items()}
    order = (leader for leader in values if leader.shape.memory_space == HBM)
    order = sorted(
        order, key=lambda v: (-size[v], v not in outputs, min(x.start for x in values[v]))
    )
    homes, tenants = {}, {}
    for leader in order:
        if leader in outputs:
            tenants[leader] = list(values[leader])
        elif leader not in parameters:
            for home in reversed(tenants):
                if not _clash(values[leader], tenants[home], ties):
                    homes[leader] = home
                    tenants[home] += values[leader]
                    break
    return homes


def _clash(some: list[Value], others: list[Value], ties: set[tuple[int, int]]) -> bool:
    """Whether values of both are live at once, but for one that takes over the other's memory."""
    for one, other in itertools.product(some, others):
        first, then = (one, other) if one.start <= other.start else (other, one)
        if first.end > then.start or first.end == then.start and (id(first), id(then)) not in ties:
            return True
    return False


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of `spans` (first and last step) as spans that do not touch."""
    merged = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _live_bytes(memories: list[_Memory], space: int, ranges: LiveRanges) -> list[int]:
    """Bytes of `space` that are taken at each step."""
    changes = [0] * (len(ranges.steps) + 1)
    for memory in memories:
        if memory.space == space:
            for first, last in memory.spans:
                changes[first] += memory.size
                changes[last + 1] -= memory.size
    return list(itertools.accumulate(changes[:-1]))


def _buffers(memory: _Memory, step: int, naming: Naming) -> Iterator[Buffer]:
    """What `memory` holds at `step`; a second one if it is a result's and a temporary in it."""
    own = [value for value in memory.values if value.leader is memory.leader]
    live = [value for value in memory.values if value.start <= step <= value.end]
    value = live[-1] if live else own[-1]
    together = [other for other in memory.values if other.leader is value.leader]
    size = max(other.shape.tiled_bytes for other in together)
    yield _named(together, value, size, naming)
    if size < memory.size:
        rest = _named(own, own[-1], memory.size - size, naming)
        yield dataclasses.replace(rest, untiled_bytes=rest.bytes)


def _named(together: list[Value], value: Value, size: int, naming: Naming) -> Buffer:
    """`size` bytes that hold `value`, one of those `together` in them."""
    maker, kind = naming.maker(together, value), naming.kind(together, value)
    return Buffer(
        bytes=size,
        untiled_bytes=value.shape.bytes,
        dtype=value.shape.dtype,
        dims=value.shape.dims,
        kind=kind,
        phase=phase(maker.op_name) or OTHER,
        path=naming.path(together, value, kind),
        op_name=maker.op_name,
        source=naming.source(maker),
        instruction=maker.name,
    )


def _events(
    ranges: LiveRanges, naming: Naming, hbm: list[int], host: list[int], code_bytes: int
) -> Iterator[Event]:
    """One event a step."""
    current = OTHER
    for step, taken, taken_host in zip(ranges.steps, hbm, host, strict=True):
        made = step.instruction
        current = phase(made.op_name) or current
        loops = tuple(loop.name for loop in step.loops)
        path = module_path(made.op_name) or naming.purpose(made)
        yield Event(made.name, made.opcode, path, current, loops, taken + code_bytes, taken_host)


def _loops(module: Module, ranges: LiveRanges) -> Iterator[Loop]:
    """The loops, outer ones before inner ones."""
    for made, (first, last) in sorted(ranges.loop_steps.items(), key=lambda item: item[1][0]):
        named = phase(made.op_name) or OTHER
        path = module_path(made.op_name)
        yield Loop(made.name, path, named, first, last, trip_count(module, made))
