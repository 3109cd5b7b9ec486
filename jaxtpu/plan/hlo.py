"""The scheduled HLO text of a compiled program (`compiled.as_text()`), as dataclasses.

Only the text's structure is read here; what it costs in bytes or cycles is for the modules that
import this one. Attributes are parsed when first asked for: most of a text is never looked at.
"""

import dataclasses
import functools
import json
import re

from jaxtpu.plan.hlo_text import PAIR, Frame, closing, split, stack_frames, unquoted
from jaxtpu.plan.shapes import HBM, HOST, VMEM, Shape, TupleShape, parse_shape, shape_end

__all__ = [
    "HBM", "HOST", "VMEM", "Alias", "Computation", "Frame", "HloSyntaxError", "Instruction",
    "Module", "Shape", "TupleShape", "parse_hlo", "trip_count",
]  # fmt: skip

_NAME = re.compile(r"%([\w.\-]+)")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
# A Pallas kernel's, which the compiler prints on lines of their own.
_NOTES = re.compile(r"kernel_metadata=\{\n.*?\n\}", re.DOTALL)
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_FRAME_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_CALLERS = (
    "calls", "to_apply", "body", "condition", "true_computation", "false_computation",
    "branch_computations", "called_computations",
)  # fmt: skip


class HloSyntaxError(Exception):
    """A bug of this parser, or a new spelling of HLO: the line that it could not read."""

    def __init__(self, line_number: int, line: str, problem: str):
        shown = line if len(line) <= 300 else line[:300] + "..."
        super().__init__(f"HLO text, line {line_number}: {problem}: {shown}")


@dataclasses.dataclass(frozen=True)
class Alias:
    """A leaf of a result, by its index path, that takes the memory of a parameter or operand."""

    output_index: tuple[int, ...]
    parameter: int
    parameter_index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One scheduled operation.

    Attributes:
      name: unique in the module.
      shape: of its result.
      opcode: `fusion`, `while`, `all-gather-start`, ...
      operands: names of instructions of the same computation.
      literal: what stands between the parentheses: a constant's value, a parameter's number.
      text: its attributes as printed.
      is_root: whether it is the computation's result.
    """

    name: str
    shape: Shape | TupleShape
    opcode: str
    operands: tuple[str, ...]
    literal: str
    text: str
    is_root: bool = False

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """Attributes as printed: `kind`, `calls`, `replica_groups`, `metadata`, ..."""
        pairs = (part.partition("=") for part in split(self.text) if part)
        return {key.strip(): value for key, _, value in pairs}

    @functools.cached_property
    def backend_config(self) -> dict:
        """The backend's own notes (JSON); empty where there are none or they are not JSON."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text) if text else {}
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """`op_name`, `stack_frame_id`, `source_file`, `source_line`: those that are given."""
        pairs = PAIR.findall(self.attributes.get("metadata", ""))
        return {key: unquoted(value) for key, value in pairs}

    @property
    def op_name(self) -> str:
        """The path of the JAX operation, `jit(step)/jvp(model)/layers/mlp/dot_general`, or ""."""
        return self.metadata.get("op_name", "")

    @property
    def stack_frame_id(self) -> int:
        """Key of the module's frames; 0 where there is none."""
        return int(self.metadata.get("stack_frame_id", 0))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs, a loop's body before its condition."""
        if "%" not in self.text:
            return ()
        found = (_NAME.findall(self.attributes.get(key, "")) for key in _CALLERS)
        return tuple(name for names in found for name in names)

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """Operands (by number, as parameters) whose memory the result must take."""
        return _aliases(self.attributes.get("output_to_operand_aliasing", ""))

    @property
    def estimated_cycles(self) -> int | None:
        """Cycles of one run by the compiler's own cost model; None where it gives none."""
        found = re.search(r'"estimated_cycles":"?(\d+)', self.text)
        return int(found[1]) if found else None

    @property
    def custom_call_target(self) -> str:
        """What a custom call calls (`AllocateBuffer`, `tpu_custom_call`), or ""."""
        return unquoted(self.attributes.get("custom_call_target", ""))


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(i for i in reversed(self.instructions) if i.is_root)

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters by their number."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
      name: `jit_train_step`.
      attributes: of its first line, as printed.
      computations: by name, callees before their callers.
      entry: the computation that runs.
      input_output_alias: parameters donated to the output.
      stack_frames: by id: a place and the id of the caller's frame (0: none).
    """

    name: str
    attributes: dict[str, str]
    computations: dict[str, Computation]
    entry: Computation
    input_output_alias: tuple[Alias, ...] = ()
    stack_frames: dict[int, tuple[Frame, int]] = dataclasses.field(default_factory=dict)

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The places in the source that made `instruction`, the innermost first; often one."""
        frames, key = [], instruction.stack_frame_id
        while key in self.stack_frames and len(frames) < len(self.stack_frames):
            frame, key = self.stack_frames[key]
            frames.append(frame)
        meta = instruction.metadata
        if not frames and "source_file" in meta:
            frames.append(Frame(meta["source_file"], int(meta.get("source_line", 0))))
        return tuple(frames)


def parse_hlo(text: str) -> Module:
    """The module printed as `text`, in one pass over it.

    Raises:
      HloSyntaxError: a line reads as nothing known.
    """
    header = entry = name = ""
    computations, instructions = {}, None
    tables, table = {title: {} for title in _FRAME_TABLES}, None
    for number, line in enumerate(_NOTES.sub(_one_line, text).split("\n"), 1):
        if not line or line.isspace():
            table = None
        elif instructions is not None and line[0] == "}":
            computations[name] = Computation(name, tuple(instructions))
            instructions = None
        elif instructions is not None:
            instructions.append(_instruction(line, number))
        elif table is not None:
            key, _, value = line.partition(" ")
            table[int(key)] = value
        elif line in tables:
            table = tables[line]
        elif line.startswith("HloModule "):
            header = line
        elif found := _COMPUTATION.match(line):
            name, instructions = found[2], []
            entry = name if found[1] else entry
        else:
            raise HloSyntaxError(number, line, "neither a computation nor a table of the head")
    if instructions is not None or entry not in computations:
        raise HloSyntaxError(number, line, "the text ends before the entry computation does")
    title, *parts = split(header.removeprefix("HloModule "))
    attributes = dict(part.split("=", 1) for part in parts)
    aliases = _aliases(attributes.get("input_output_alias", ""))
    frames = stack_frames(**tables)
    return Module(title, attributes, computations, computations[entry], aliases, frames)


def trip_count(module: Module, instruction: Instruction) -> int | None:
    """How often the `while` loop runs its body; None where the text does not say."""
    known = instruction.backend_config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known)
    condition = module.computations[instruction.attributes["condition"].lstrip("%")]
    return _limit(module, condition, {})


def _limit(module: Module, condition: Computation, given: dict[str, int]) -> int | None:
    """N of the root `compare(i, constant(N))`, in a fusion too, whose constants are `given`."""
    constants = given | {
        i.name: int(i.literal)
        for i in condition.instructions
        if i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal)
    }
    root = condition.root
    values = [constants.get(name) for name in root.operands]
    if root.opcode == "fusion":
        fused = module.computations[root.called[0]]
        passed = zip((p.name for p in fused.parameters), values, strict=True)
        return _limit(module, fused, {name: n for name, n in passed if n is not None})
    known = [n for n in values if n is not None]
    if root.opcode != "compare" or len(known) != 1:
        return None
    direction = root.attributes.get("direction")
    more = {"LT": 0, "NE": 0, "LE": 1} if values[0] is None else {"GT": 0, "NE": 0, "GE": 1}
    return known[0] + more[direction] if direction in more else None


def _one_line(found: re.Match) -> str:
    return found[0].replace("\n", "")


def _instruction(line: str, number: int) -> Instruction:
    """The instruction of one line."""
    found = _INSTRUCTION.match(line)
    if not found:
        raise HloSyntaxError(number, line, "not an instruction")
    end = shape_end(line, found.end())
    opcode = _OPCODE.match(line, end)
    if end == found.end() or not opcode:
        raise HloSyntaxError(number, line, "no shape or no opcode")
    close = closing(line, opcode.end())
    if close < 0:
        raise HloSyntaxError(number, line, "operands without an end")
    inside = line[opcode.end() : close]
    try:
        shape = parse_shape(line[found.end() : end])
    except ValueError as error:
        raise HloSyntaxError(number, line, str(error)) from error
    return Instruction(
        found[2], shape, opcode[1], tuple(_NAME.findall(inside)), inside,
        line[close + 1 :].lstrip(", "), bool(found[1]),
    )  # fmt: skip


def _aliases(text: str) -> tuple[Alias, ...]:
    """The attribute input_output_alias."""
    path = lambda numbers: tuple(int(n) for n in numbers.split(",") if n.strip())  # noqa: E731
    return tuple(Alias(path(out), int(p), path(index)) for out, p, index in _ALIAS.findall(text))
