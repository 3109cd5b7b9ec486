"""The arrays that a compiled program makes, when each is needed, and which share memory.

Loops are walked once, in place: the arrays of a body stand beside those that its caller holds.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jaxtpu.plan.hlo import Computation, Instruction, Module, Shape
from jaxtpu.plan.shapes import alike, leaf_range

_PASS_ON = {"tuple", "bitcast", "optimization-barrier", "async-update", "add-dependency"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}  # of operand 0, where the compiler notes nothing


@dataclasses.dataclass(eq=False)
class Value:
    """One array.

    Attributes:
      shape: as it lies in memory.
      maker: the instruction that makes it; in a loop's body, the parameter that brings it.
      start: index of the step that makes it.
      end: index of the last step that needs it.
      users: instructions that read it; not those that only pass it on.
      inputs: what its maker reads; in a loop's body, what the loop starts with.
    """

    shape: Shape
    maker: Instruction
    start: int
    end: int
    users: list[Instruction] = dataclasses.field(default_factory=list)
    inputs: "Values" = ()
    _leader: "Value | None" = dataclasses.field(default=None, repr=False)

    @property
    def leader(self) -> "Value":
        """The value that stands for all that share its memory."""
        value = self
        while value._leader is not None:
            value = value._leader
        if value is not self:
            self._leader = value
        return value

    def share(self, other: "Value") -> None:
        """Puts this value and `other` into the same memory."""
        if self.leader is not other.leader:
            other.leader._leader = self.leader


Values = tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One scheduled instruction and the `while` instructions around it, outermost first."""

    instruction: Instruction
    loops: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class LiveRanges:
    """Of one program.

    Attributes:
      steps: in the order in which they run, each loop's body once.
      values: all arrays, in the order in which they are made.
      parameters: values of the program's parameters, by their number.
      results: values of its result.
      ties: a value and one made where it ends, which may take over its memory.
      loop_steps: for each `while`, the first and the last step of its condition and body.
    """

    steps: list[Step]
    values: list[Value]
    parameters: list[Values]
    results: Values
    ties: list[tuple[Value, Value]]
    loop_steps: dict[Instruction, tuple[int, int]]


def live_ranges(module: Module) -> LiveRanges:
    """The values of `module`, those that must share memory in it already.

    These are a loop's carry with its operand and result, a result that `output_to_operand_aliasing`
    ties to an operand, and a donated parameter with the result that is aliased to it. Parameters
    and constants are live from start to end, donated ones too: the compiler gives a parameter's
    memory to nothing but that result.
    """
    walk = _Walk(module)
    results = walk.run(module.entry, None)
    parameters = [walk.leaves[p.name] for p in module.entry.parameters]
    last = len(walk.steps) - 1
    for value in results:
        value.end = last
    donated = {alias.parameter for alias in module.input_output_alias}
    _stay(itertools.chain(*(p for i, p in enumerate(parameters) if i not in donated)), last)
    ties = walk.dead_ties()
    for alias in module.input_output_alias:
        outputs = results[leaf_range(module.entry.root.shape, alias.output_index)]
        shape = module.entry.parameters[alias.parameter].shape
        inputs = parameters[alias.parameter][leaf_range(shape, alias.parameter_index)]
        for given, result in zip(inputs, outputs, strict=True):
            given.share(result)
    _stay(itertools.chain(*parameters), last)
    _stay((value for value in walk.values if value.maker.opcode == "constant"), last)
    return LiveRanges(walk.steps, walk.values, parameters, results, ties, walk.loop_steps)


def _stay(values: Iterable[Value], last: int) -> None:
    """Makes `values` live from the first step to the `last`."""
    for value in values:
        value.start, value.end = 0, last


class _Walk:
    """The walk over the schedule: what `live_ranges` returns, while it is being made."""

    def __init__(self, module: Module):
        self.module = module
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.leaves: dict[str, Values] = {}  # by instruction
        self.loop_steps: dict[Instruction, tuple[int, int]] = {}
        self._loops: tuple[Instruction, ...] = ()
        self._ties: list[tuple[Value, Value]] = []  # operand and result that may share memory

    def run(self, computation: Computation, arguments: Sequence[Values] | None) -> Values:
        """Walks `computation`; the values of its result. None as arguments: the program's own."""
        for instruction in computation.instructions:
            if instruction.opcode == "parameter" and arguments is not None:
                values = arguments[int(instruction.literal)]
            else:
                values = self._visit(instruction, computation)
            self.leaves[instruction.name] = values
        return self.leaves[computation.root.name]

    def dead_ties(self) -> list[tuple[Value, Value]]:
        """The ties whose operand nothing needs after the result is made."""
        return [
            (operand, result)
            for operand, result in self._ties
            if operand.end <= result.start and _space(operand) == _space(result)
        ]

    def _visit(self, instruction: Instruction, computation: Computation) -> Values:
        """Adds the step of `instruction` and the uses of its operands; the values it yields."""
        self.steps.append(Step(instruction, self._loops))
        opcode, operands = instruction.opcode, [self.leaves[name] for name in instruction.operands]
        given = tuple(itertools.chain(*operands))
        if opcode in _PASS_ON:
            return given
        if opcode == "get-tuple-element":
            whole = computation.by_name[instruction.operands[0]].shape
            return given[leaf_range(whole, (int(instruction.attributes["index"]),))]
        for value in given:
            value.end = self._now
            value.users.append(instruction)
        if opcode == "while":
            return self._while(instruction, given)
        if opcode == "conditional":
            return self._conditional(instruction, operands[1:])
        if opcode == "call":
            return self.run(self.module.computations[instruction.called[0]], operands)
        if opcode.endswith("-done"):
            return self._done(instruction, given)
        made = self._made(instruction, given)
        for alias in instruction.aliases:
            whole = computation.by_name[instruction.operands[alias.parameter]].shape
            source = operands[alias.parameter][leaf_range(whole, alias.parameter_index)]
            results = made[leaf_range(instruction.shape, alias.output_index)]
            for operand, result in zip(source, results, strict=True):
                operand.share(result)
        return made

    @property
    def _now(self) -> int:
        """Index of the latest step."""
        return len(self.steps) - 1

    def _new(self, maker: Instruction, shapes: Iterable[Shape], inputs: Values = ()) -> Values:
        """Values of `shapes` that `maker` makes now."""
        made = tuple(Value(shape, maker, self._now, self._now, [], inputs) for shape in shapes)
        self.values.extend(made)
        return made

    def _while(self, instruction: Instruction, given: Values) -> Values:
        """Walks the condition and the body; the loop's result, in its operand's memory."""
        condition = self.module.computations[instruction.attributes["condition"].lstrip("%")]
        body = self.module.computations[instruction.attributes["body"].lstrip("%")]
        carried = self._new(body.parameters[0], instruction.shape.leaves)
        first, outer, self._loops = self._now + 1, self._loops, (*self._loops, instruction)
        self.run(condition, [carried])
        after = self.run(body, [carried])
        self._loops = outer
        self.loop_steps[instruction] = (first, self._now)
        for value in after:
            value.end = self._now
        results = self._new(instruction, instruction.shape.leaves)
        for same in zip(given, carried, after, results, strict=True):
            same[1].inputs = same[-1].inputs = same[:1]
            for value in same[1:]:
                same[0].share(value)
        return results

    def _conditional(self, instruction: Instruction, operands: list[Values]) -> Values:
        """Walks the branches one after the other, each as if alone; the result of any."""
        ends = []
        for name, operand in zip(instruction.called, operands, strict=True):
            ends.append(self.run(self.module.computations[name], [operand]))
            for value in ends[-1]:
                value.end = self._now
        results = self._new(instruction, instruction.shape.leaves)
        for same in zip(results, *ends, strict=True):
            for value in same[1:]:
                same[0].share(value)
        return results

    def _done(self, instruction: Instruction, started: Values) -> Values:
        """The end of an asynchronous operation yields what its start has made, by shape."""
        rest, found = [v for v in started if v.maker.opcode != "parameter"] or list(started), []
        rest.sort(key=lambda v: v.maker.name != instruction.operands[0])  # its own values first
        for shape in instruction.shape.leaves:
            at = next((i for i, v in enumerate(rest) if alike(v.shape, shape)), None)
            found.append(self._new(instruction, [shape])[0] if at is None else rest.pop(at))
        return tuple(found)

    def _made(self, instruction: Instruction, given: Values) -> Values:
        """What an ordinary operation makes, and whose memory that may take."""
        shapes, passed = instruction.shape.leaves, {}
        starts = instruction.opcode.endswith("-start") or instruction.opcode == "send"
        if instruction.opcode == "copy-start":  # (copy, original, context)
            passed = {1: given[0]}
        elif starts and len(shapes) > len(given):  # (operands, results, contexts)
            passed = dict(enumerate(given))
        made = tuple(
            passed[i] if i in passed else self._new(instruction, [shape], given)[0]
            for i, shape in enumerate(shapes)
        )
        ties = self._ties_of(instruction, len(given))
        self._ties += [(given[operand], made[result]) for operand, result in ties]
        return made

    def _ties_of(self, instruction: Instruction, operands: int) -> Iterator[tuple[int, int]]:
        """Leaves of the operands (so many) and of the result that may share memory."""
        noted = instruction.backend_config.get("aliasing_operands")
        if noted is not None:
            for group in noted["lists"]:
                numbers = [int(n) for n in group["indices"]]
                results = [n - operands for n in numbers if n >= operands]
                yield from itertools.product([n for n in numbers if n < operands], results)
        elif instruction.opcode in _IN_PLACE:
            yield 0, 0
        elif instruction.opcode == "fusion":
            yield from _updated(self.module.computations[instruction.called[0]])


def _updated(fused: Computation) -> Iterator[tuple[int, int]]:
    """Parameters of a fusion that its root updates in place, and which of its results each is."""

    def source(name: str) -> Instruction:
        """The instruction behind bitcasts."""
        found = fused.by_name[name]
        return source(found.operands[0]) if found.opcode == "bitcast" else found

    root = source(fused.root.name)
    for number, name in enumerate(root.operands if root.opcode == "tuple" else [root.name]):
        update = source(name)
        target = source(update.operands[0]) if update.opcode in _IN_PLACE else update
        if target.opcode == "parameter" and target is not update:
            yield int(target.literal), number


def _space(value: Value) -> tuple[int, int]:
    """Which memory, and how many bytes of it."""
    return value.shape.memory_space, value.shape.tiled_bytes
