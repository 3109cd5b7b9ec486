"""What the fusions of a scheduled program do: products, moves, parts of collectives."""

import dataclasses

from jaxtpu.plan.collectives import KINDS
from jaxtpu.plan.hlo import Computation, Instruction, Module

MOVES = {
    "bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice",
    "dynamic-update-slice", "get-tuple-element", "iota", "pad", "parameter", "partition-id",
    "reshape", "reverse", "slice", "transpose", "tuple",
}  # fmt: skip
_PRODUCTS = ("convolution", "dot")
_ENDS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a computation of a fusion does.

    Attributes:
      product: whether it has a matrix product.
      moves: whether it does nothing but move data.
      collective: that it runs, or is a part of.
      operand_bytes, result_bytes: of that collective's operands, and of the fusion's result.
      role: `start` or `done` where it is that end of an asynchronous collective.
    """

    product: bool
    moves: bool
    collective: Instruction | None
    operand_bytes: int
    result_bytes: int
    role: str


class Fusions:
    """The contents of a module's fusions, each looked at once."""

    def __init__(self, module: Module):
        self._module = module
        self._contents: dict[str, Contents] = {}

    def inside(self, name: str) -> Contents:
        """Contents of a fusion's computation, fusions inside it included."""
        if name not in self._contents:
            computation = self._module.computations[name]
            parts = computation.instructions
            nested = [self.inside(i.called[0]) for i in parts if i.opcode == "fusion"]
            flat = [i for i in parts if i.opcode != "fusion"]
            found = next((i for i in flat if i.opcode in KINDS), None)
            targets = {i.custom_call_target for i in flat if i.opcode == "custom-call"}
            self._contents[name] = Contents(
                any(i.opcode in _PRODUCTS for i in flat) or any(c.product for c in nested),
                all(i.opcode in MOVES for i in flat) and all(c.moves for c in nested),
                found,
                operand_bytes(found, computation) if found else 0,
                computation.root.shape.bytes,
                next((role for target, role in _ENDS.items() if target in targets), ""),
            )
        return self._contents[name]

    def is_product(self, instruction: Instruction) -> bool:
        """Whether it is a matrix product, or a fusion with one in it."""
        if instruction.opcode == "fusion":
            return self.inside(instruction.called[0]).product
        return instruction.opcode in _PRODUCTS


def operand_bytes(instruction: Instruction, computation: Computation) -> int:
    """Bytes of the operands, without padding."""
    return sum(computation.by_name[name].shape.bytes for name in instruction.operands)
