"""A compiled program's schedule, played through with a clock.

An operation takes the cycles that the compiler estimates. What it gives none for is modelled:

- An asynchronous transfer (a collective, or a copy between memories) runs while what is scheduled
  between its start and its done does; the rest is waited for. Transfers that need the same links,
  or the same memory, run one after another. HBM traffic of the compute beside them is ignored.
- A Pallas kernel takes what `kernel_costs.py` says; a gather, scatter or sort moves its operands
  and its result.
- A loop's body is played twice; its second run stands for all that follow.
- A branch takes the longest of its computations.
"""

import collections
import dataclasses
import re
from collections.abc import Callable

from jaxtpu.hardware import Generation, Slice
from jaxtpu.plan.collectives import (
    KINDS,
    NETWORK,
    Collective,
    Network,
    make_collective,
    make_dcn_transfer,
)
from jaxtpu.plan.fusions import MOVES, Fusions, operand_bytes
from jaxtpu.plan.hlo import HOST, Computation, Instruction, Module, trip_count
from jaxtpu.plan.kernel_costs import KERNEL, kernel_flops, kernel_seconds

# Share of the compiler's rate that matrix products reach; the same for every generation. Fitted by
# `run.py plan --validate` to published speeds: the best of 0.75 to 1, the compiler as it is.
PRODUCT_EFFICIENCY = 1.0
# Between a host and a chip: PCIe, https://jax-ml.github.io/scaling-book/tpus
HOST_BYTES_PER_SECOND = 15e9
PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "elementwise"
COPIES, KERNELS = "copies", "kernels"
CATEGORIES = (PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, KERNELS)

_ATTENTION = re.compile(r".*/(?:attention|attn)/([^/]+)")
_PROJECTIONS = {"query", "key", "value", "out"}  # in it, but the work of any linear layer
_BY_BYTES = {"fusion", "gather", "scatter", "sort"}  # where they have no cycles
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')


def clock(generation: Generation) -> float:
    """Cycles a second. Where none is known (v7x): at which four matrix units a core, as on v6e,
    reach the published peak."""
    return generation.clock_hz or generation.peak_flops_bf16 / (8 * generation.mxu_size**2)


@dataclasses.dataclass(frozen=True)
class Constants:
    """The fitted constants of the time model, as values: a fit tries others."""

    product_efficiency: float = PRODUCT_EFFICIENCY
    network: Network = NETWORK


CONSTANTS = Constants()


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy between memories: its seconds, and the lane that copies wait for one another in."""

    seconds: float
    lane: str


class Player:
    """Plays computations.

    A `weight` is how often that which is played runs in a step.

    Attributes:
      now: seconds so far.
      cycles: so far, as the compiler estimates them.
      seconds: of compute and of waits for copies, by category.
      kernel_seconds, kernel_flops: of Pallas kernels.
      busy, exposed: seconds of collectives, and those of them that are waited for, by kind.
      collectives: how often each runs.
      unknown_loops: names of loops whose length is not known.
    """

    def __init__(self, module: Module, slice_: Slice, constants: Constants = CONSTANTS):
        self._module, self._slice, self._constants = module, slice_, constants
        self._fusions = Fusions(module)
        self._clock = clock(slice_.generation)
        self.now, self.cycles = 0.0, 0
        self.kernel_seconds = self.kernel_flops = 0.0
        self.seconds: collections.Counter[str] = collections.Counter()
        self.busy: collections.Counter[str] = collections.Counter()
        self.exposed: collections.Counter[str] = collections.Counter()
        self.collectives: dict[Collective, int] = {}
        self.unknown_loops: list[str] = []
        self._free: dict[str, float] = {}  # when the last transfer of a lane ends
        self._pending: dict[str, tuple[float, Collective | Copy, int]] = {}  # end, itself, weight

    def run(self, computation: Computation, weight: int = 1) -> None:
        for instruction in computation.instructions:
            self._play(instruction, computation, weight)

    def wait_for_all(self) -> None:
        """The program ends when its transfers have."""
        for key in list(self._pending):
            self._done(key)

    def _play(self, instruction: Instruction, computation: Computation, weight: int) -> None:
        special: dict[str, Callable] = {
            "while": self._loop, "conditional": self._branch, "call": self._call,
            "fusion": self._fusion, "send": self._send, "recv-done": self._received,
        }  # fmt: skip
        base, _, half = instruction.opcode.rpartition("-")
        if instruction.opcode in special:
            special[instruction.opcode](instruction, computation, weight)
        elif half == "done":
            self._done(instruction.operands[0])
        elif half == "update":
            self._pending[instruction.name] = self._pending.pop(instruction.operands[0])
        elif half == "start":
            self._start(instruction.name, self._transfer(instruction, base, computation), weight)
        elif instruction.opcode in KINDS:
            made = self._collective(instruction.opcode, instruction, computation)
            self._start(instruction.name, made, weight)
            self._done(instruction.name)
        else:
            self._compute(instruction, computation, weight)

    def _loop(self, loop: Instruction, _: Computation, weight: int) -> None:
        runs = trip_count(self._module, loop)
        if runs is None:
            self.unknown_loops.append(loop.name)
            runs = 1
        body = self._module.computations[loop.attributes["body"].lstrip("%")]
        if runs > 0:
            self.run(body, weight)
        if runs > 1:
            before = self.now
            self.run(body, weight * (runs - 1))
            self.now += (self.now - before) * (runs - 2)

    def _branch(self, branch: Instruction, _: Computation, weight: int) -> None:
        computations = [self._module.computations[name] for name in branch.called]
        self.run(max(computations, key=self._alone), weight)

    def _alone(self, computation: Computation) -> float:
        player = Player(self._module, self._slice, self._constants)
        player.run(computation)
        player.wait_for_all()
        return player.now

    def _call(self, call: Instruction, _: Computation, weight: int) -> None:
        self.run(self._module.computations[call.called[0]], weight)

    def _fusion(self, fusion: Instruction, computation: Computation, weight: int) -> None:
        """A fusion computes, also while it is a part of a collective that has started; or it is
        the start, the end or the whole of a collective."""
        inside = self._fusions.inside(fusion.called[0])
        key = inside.collective and f"channel {inside.collective.attributes.get('channel_id')}"
        if inside.role == "done":
            self._done(key)
        elif key is None or key in self._pending:
            self._compute(fusion, computation, weight)
        else:
            kind = inside.collective.opcode
            if kind == "all-reduce" and inside.result_bytes < inside.operand_bytes:
                kind = "reduce-scatter"
            size, config = inside.operand_bytes, fusion.backend_config
            made = self._make(kind, inside.collective, size, config)
            if fusion.estimated_cycles:
                self._compute(fusion, computation, weight)
            self._start(key, made, weight)
            if not inside.role:
                self._done(key)

    def _transfer(
        self, start: Instruction, base: str, computation: Computation
    ) -> Collective | Copy:
        """What an instruction `base`-start starts."""
        if base in KINDS:
            return self._collective(base, start, computation)
        if base == "async":
            inner = self._module.computations[start.called[0]]
            found = next((i for i in inner.instructions if i.opcode in KINDS), None)
            if found:
                return self._collective(found.opcode, found, inner)
        moved = start.shape.elements[1]  # (the operands, the result, semaphores)
        if base == "dynamic-update-slice":  # its result is the whole array
            moved = start.shape.elements[0].elements[1]
        spaces = {leaf.memory_space for leaf in start.shape.leaves}
        if HOST in spaces:
            rate = HOST_BYTES_PER_SECOND / self._slice.generation.devices_per_chip
            return Copy(moved.bytes / rate, "host")
        return Copy(moved.bytes / self._slice.generation.hbm_bandwidth, "hbm")

    def _collective(self, kind: str, stated: Instruction, computation: Computation) -> Collective:
        return self._make(kind, stated, operand_bytes(stated, computation), stated.backend_config)

    def _make(self, kind: str, stated: Instruction, size: int, config: dict) -> Collective:
        network = self._constants.network
        return make_collective(kind, stated, size, config, self._slice, network)

    def _send(self, send: Instruction, computation: Computation, weight: int) -> None:
        """The multi-slice runtime sends an operand and brings what `recv-done` waits for."""
        if meeting := _RENDEZVOUS.search(send.text):
            size = computation.by_name[send.operands[0]].shape.bytes
            made = make_dcn_transfer(send, size, self._slice, self._constants.network)
            self._start(meeting[1], made, weight)

    def _received(self, done: Instruction, computation: Computation, _: int) -> None:
        if meeting := _RENDEZVOUS.search(computation.by_name[done.operands[0]].text):
            self._done(meeting[1])

    def _start(self, key: str, transfer: Collective | Copy, weight: int) -> None:
        end = max(self.now, self._free.get(transfer.lane, 0.0)) + transfer.seconds
        self._free[transfer.lane] = end
        self._pending[key] = (end, transfer, weight)
        if isinstance(transfer, Collective):
            self.collectives[transfer] = self.collectives.get(transfer, 0) + weight
            self.busy[transfer.kind] += transfer.seconds * weight

    def _done(self, key: str | None) -> None:
        """Waits for a transfer, if it has started."""
        end, transfer, weight = self._pending.pop(key, (0.0, None, 0))
        wait = max(0.0, end - self.now)
        self.now += wait
        if isinstance(transfer, Collective):
            self.exposed[transfer.kind] += wait * weight
        elif transfer:
            self.seconds[COPIES] += wait * weight

    def _compute(self, instruction: Instruction, computation: Computation, weight: int) -> None:
        cycles = instruction.estimated_cycles
        if cycles is None:
            seconds = self._seconds_by_bytes(instruction, computation)
        else:
            self.cycles += cycles * weight
            seconds = cycles / self._clock
            if self._fusions.is_product(instruction):
                seconds /= self._constants.product_efficiency
        if instruction.custom_call_target == KERNEL:
            self.kernel_seconds += seconds * weight
            self.kernel_flops += kernel_flops(instruction, computation) * weight
        if seconds:
            self.now += seconds
            self.seconds[self._category(instruction)] += seconds * weight

    def _seconds_by_bytes(self, instruction: Instruction, computation: Computation) -> float:
        """Seconds of what has no cycles: 0 of scalars and of what only names memory."""
        kernel = instruction.custom_call_target == KERNEL
        if not kernel and instruction.opcode not in _BY_BYTES:
            return 0.0
        generation = self._slice.generation
        moved = operand_bytes(instruction, computation) + instruction.shape.bytes
        if kernel:
            return kernel_seconds(instruction, computation, moved, generation)
        return moved / generation.hbm_bandwidth

    def _path(self, instruction: Instruction) -> str:
        """Path of the JAX operation; of a fusion without one, that of the last inside that has."""
        if "/" in instruction.op_name or instruction.opcode != "fusion":
            return instruction.op_name
        inside = self._module.computations[instruction.called[0]].instructions
        return next((i.op_name for i in reversed(inside) if "/" in i.op_name), "")

    def _category(self, instruction: Instruction) -> str:
        within = _ATTENTION.match(self._path(instruction))
        if within and within[1] not in _PROJECTIONS:
            return ATTENTION
        if instruction.custom_call_target == KERNEL:
            return KERNELS
        if self._fusions.is_product(instruction):
            return PRODUCTS
        if instruction.opcode == "fusion":
            return COPIES if self._fusions.inside(instruction.called[0]).moves else ELEMENTWISE
        return COPIES if instruction.opcode in MOVES else ELEMENTWISE
