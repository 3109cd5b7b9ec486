"""What a buffer of a compiled program is: its kind, its module's path, its line of source.

All of it is read off the names that JAX gives its operations: `jvp(` marks the forward pass,
`transpose(` the backward one, and the scopes between are the modules.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator

from jaxtpu.plan.hlo import Instruction, Module
from jaxtpu.plan.live_ranges import LiveRanges, Value
from jaxtpu.plan.shapes import alike

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-\w+)(-start)?"
)
_REDUCTION = re.compile(r"(all-reduce|reduce-scatter)(-start)?")
_CONTROL = {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"} | {
    "eval_jaxpr", "remat", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map",
}  # fmt: skip
_KEY = re.compile(r"\['?([^'\]]+)'?\]|([A-Za-z_]\w*)")
_COPIES = {"copy", "copy-start", "slice-start", "convert"}
_MOVES = _COPIES | {"parameter", "constant", "while", "bitcast", "reshape", "transpose"}
_PARTS = {"slice", "dynamic-slice", "all-gather", "all-gather-start"}  # of weights, and wholes
_PLACEHOLDERS = {"parameter", "while", "broadcast", "custom-call", "constant"} | _COPIES


def phase(op_name: str) -> str | None:
    """Which pass an operation belongs to; None where it has no name of JAX's."""
    if "transpose(" in op_name:
        return BACKWARD
    if "jvp(" in op_name:
        return FORWARD
    return OTHER if "/" in op_name else None


@functools.lru_cache(maxsize=65536)
def module_path(op_name: str) -> str:
    """`decoder/layers/mlp` of `jit(step)/jvp(model)/decoder/while/body/layers/mlp/dot_general`."""
    parts = op_name.split(";")[0].split("/")[:-1]
    return "/".join(p for p in parts if p not in _CONTROL and not re.search(r"[()]|->", p))


@functools.lru_cache(maxsize=65536)
def parameter_path(op_name: str) -> str:
    """`params/layers/kernel` of `state.params['layers']['kernel']`, `batch/inputs` of a dict's."""
    keys = [a or b for a, b in _KEY.findall(op_name)]
    return "/".join(keys[1:] if re.match(r"\w+\.", op_name) else keys)


def _depth(maker: Instruction) -> tuple[int, bool]:
    """How precisely its name says where an instruction belongs."""
    path = module_path(maker.op_name)
    return path.count("/") + bool(path), "/" in maker.op_name


def _tells(maker: Instruction) -> bool:
    """Whether its name says which module it belongs to; that of a stack's update does not."""
    return bool(module_path(maker.op_name)) and not maker.op_name.endswith("/dynamic_update_slice")


class Naming:
    """Names for the values of one program, which share memory as they will."""

    def __init__(self, module: Module, ranges: LiveRanges):
        self._module = module
        self._results = {id(value) for value in ranges.results}
        self._parameters = {
            id(value): parameter
            for parameter, values in zip(module.entry.parameters, ranges.parameters, strict=True)
            for value in values
        }
        weights = [v for vs in ranges.parameters for v in vs if len(v.shape.dims) > 1]
        weights = [value for value in weights if value.shape.dtype[0] in "fb"]
        self._sizes = {value.shape.num_elements for value in weights}
        self._weights = {id(value): self._parameters[id(value)] for value in weights}
        self._made, self._sharing = defaultdict(list), defaultdict(list)
        for value in ranges.values:
            self._made[value.maker].append(value)
            self._sharing[value.leader].append(value)
            self._add_weight(value)
        self._wholes = {
            value.shape.num_elements
            for value in ranges.values
            if id(value) in self._weights and self._is_collective(value)
        }
        self._reads = defaultdict(list)  # parameters that are weights, by who reads them
        for value in weights:
            for user in value.users:
                self._reads[user].append(value)
        self._backward = any(phase(s.instruction.op_name) == BACKWARD for s in ranges.steps)

    def kind(self, together: list[Value], value: Value) -> str:
        """What `value` is, one of those `together` in one memory."""
        makers = {phase(v.maker.op_name) for v in together}
        users = {phase(user.op_name) for v in together for user in v.users}
        if any(id(v) in self._parameters for v in together):
            return "parameter"
        if any(id(v) in self._results for v in together):
            return "output"
        if id(value) in self._weights:
            return "weight copy"
        if self._is_gradient(together, makers, users):
            return "gradient"
        if self._is_collective(value):
            return "collective"
        if FORWARD in makers and BACKWARD in users:
            return "saved activation"
        return "temporary"

    def maker(self, together: list[Value], value: Value) -> Instruction:
        """The instruction that tells most about `value`: its own, one in the same memory, what it
        puts into a stack, or one that reads it."""
        parameters = [v.maker for v in together if id(v) in self._parameters]
        own = value.maker
        if parameters or own.opcode not in _PLACEHOLDERS and _tells(own):
            return (*parameters, own)[0]
        best = max((own, *(v.maker for v in together)), key=_depth)
        if not module_path(best.op_name) and value.inputs and own.opcode in _COPIES:
            return self.maker([], value.inputs[0])
        if best.op_name.endswith("/dynamic_update_slice"):
            best = max((best, *self._stacked(best)), key=_depth)
        if "/" not in best.op_name:
            best = max((best, *(user for v in together for user in v.users)), key=_depth)
        return best

    def purpose(self, maker: Instruction) -> str:
        """The module's path of the largest value that `maker`, which has no path itself, makes."""
        made = max(self._made[maker], key=lambda v: v.shape.tiled_bytes, default=None)
        if made is None or maker.opcode in ("parameter", "while"):
            return ""
        return module_path(self.maker(self._sharing[made.leader], made).op_name)

    def _stacked(self, maker: Instruction) -> Iterator[Instruction]:
        """What makes the parts that `maker` puts into stacks."""
        shapes = [value.shape for value in self._made[maker] if value.shape.dims]  # no scalars
        stacks = {shape.num_elements // shape.dims[0] for shape in shapes}
        inputs = {id(v): v for made in self._made[maker] for v in made.inputs}
        return (v.maker for v in inputs.values() if v.shape.num_elements in stacks)

    def path(self, together: list[Value], value: Value, kind: str) -> str:
        """The module's path of `value`; of weights and gradients, the parameter's."""
        parameters = [self._parameters[id(v)] for v in together if id(v) in self._parameters]
        if kind == "weight copy":
            parameters = [self._weights[id(value)]]
        elif kind == "gradient":
            parameters = self._updated(together)
        if parameters:
            return parameter_path(parameters[0].op_name)
        return module_path(self.maker(together, value).op_name)

    def source(self, instruction: Instruction) -> str:
        """`file:line`, the innermost outside installed packages where there is one; or ""."""
        frames = self._module.frames(instruction)
        ours = [f for f in frames if not re.search(r"/(site|dist)-packages/", f.file)] or frames
        return f"{ours[0].file}:{ours[0].line}" if ours else ""

    def _is_collective(self, value: Value) -> bool:
        """Whether `value` comes from other devices, by an operation alone or in a fusion."""
        maker = value.maker
        inside = [maker]
        if maker.opcode == "fusion":
            inside = self._module.computations[maker.called[0]].instructions
        return any(
            alike(leaf, value.shape)
            for i in inside
            if _COLLECTIVE.fullmatch(i.opcode)
            for leaf in i.shape.leaves
        )

    def _is_gradient(self, together: list[Value], makers: set, users: set) -> bool:
        """Made in the backward pass and read by the optimizer, or summed up in a loop or, as large
        as a gathered weight, over devices."""
        if FORWARD in makers or not self._backward:
            return False
        size = together[0].shape.num_elements
        readers = {user.opcode for value in together for user in value.users}
        if BACKWARD in makers and size in self._wholes and any(map(_REDUCTION.fullmatch, readers)):
            return True
        summed = any(v.maker.opcode == "parameter" for v in together)
        return (BACKWARD in makers and OTHER in users) or (summed and size in self._sizes)

    def _updated(self, gradient: list[Value], hops: int = 3) -> list[Instruction]:
        """Parameters of the size of `gradient` that are read where it is, the likeliest first."""
        shape = gradient[0].shape
        users = dict.fromkeys(u for v in gradient for u in v.users if u.opcode != "while")
        same = lambda values: [v for v in values if v.shape.num_elements == shape.num_elements]  # noqa: E731
        found = [v for user in users for v in same(self._reads[user])]
        if found:
            name = lambda v: self._parameters[id(v)].op_name  # noqa: E731
            found.sort(key=lambda v: (v.shape.dims != shape.dims, len(name(v))))
            return [self._parameters[id(v)] for v in found]
        made = dict.fromkeys(v.leader for user in users for v in same(self._made[user]))
        made.pop(gradient[0].leader, None)
        after = [v for leader in made for v in self._sharing[leader]]
        return self._updated(after, hops - 1) if after and hops else []

    def _add_weight(self, value: Value) -> None:
        """Notes `value` if it is a weight and nothing more: in another type, layout or loop; a
        layer's part of a stack; or gathered from all devices."""
        sources = [v for v in value.inputs if v.maker.opcode != "constant" and v.shape.dims]
        if not sources or not all(id(v) in self._weights for v in sources):
            return
        opcodes = self._opcodes(value.maker)
        same = {v.shape.num_elements for v in sources} == {value.shape.num_elements}
        if opcodes <= _MOVES and same or opcodes & _PARTS and opcodes <= _MOVES | _PARTS:
            made = self._made[value.maker]  # one of several that are gathered together, or the one
            source = sources[made.index(value) if len(made) <= len(sources) else 0]
            self._weights[id(value)] = self._weights[id(source)]

    def _opcodes(self, maker: Instruction) -> set[str]:
        """What it does; of a fusion, what is fused."""
        if maker.opcode != "fusion":
            return {maker.opcode}
        return {i.opcode for i in self._module.computations[maker.called[0]].instructions}
