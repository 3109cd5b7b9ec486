"""A jaxpr read for its costs: operations with their FLOPs and bytes, and what is alive at once.

The TPU compiler fuses elementwise operations into their users, so only the results of matrix
products, kernels, gathers and sorts, and the operands of products, are taken to be written to HBM.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jaxtpu.plan.kernel_costs import kernel_name, splash_flops

_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
# Primitives whose results the compiler writes to memory.
_WRITTEN = _PRODUCTS | {"gather", "scatter-add", "sort", "pallas_call"}
_REDUCTIONS = {"reduce_max", "reduce_sum", "argmax"}
_NOT_ENTERED = {"scan", "while", "pallas_call"}
# A TPU tile is 8 sublanes of 128 lanes: the two minor dimensions are padded to it.
_SUBLANES, _LANES = 8, 128


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation, calls inlined; `scan` and kernels are not entered.

    Attributes:
      equation: of the jaxpr that it stands in.
      inputs: the values that it reads, equal objects for one value; None for a literal.
      outputs: the values that it makes.
    """

    equation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name


def operations(jaxpr) -> list[Operation]:
    """The operations of a jaxpr in order, those of called functions in their place."""
    return list(_inline(jaxpr, {}))


def _inline(jaxpr, names: dict) -> Iterator[Operation]:
    """`names` maps variables of `jaxpr` to the outer values that they stand for."""
    value = lambda v: None if hasattr(v, "val") else names.get(v, v)  # noqa: E731
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":  # for checkpoint policies: the value itself
            names[equation.outvars[0]] = value(equation.invars[0])
            continue
        inner = None if equation.primitive.name in _NOT_ENTERED else called(equation)
        if inner is None:
            inputs = tuple(map(value, equation.invars))
            yield Operation(equation, inputs, tuple(map(value, equation.outvars)))
            continue
        # Constants of a call stand before its arguments, so the last ones match.
        arguments = equation.invars[-len(inner.invars) :] if inner.invars else []
        inside = dict(zip(inner.invars, map(value, arguments), strict=True))
        yield from _inline(inner, inside)
        for outer, made in zip(equation.outvars, inner.outvars, strict=True):
            names[outer] = None if hasattr(made, "val") else inside.get(made, made)


def called(equation):
    """The jaxpr that an equation calls once; None if there is none."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def scans(jaxpr) -> list:
    """The scan equations of a jaxpr, of called functions too, not those inside scans."""
    return [op.equation for op in operations(jaxpr) if op.name == "scan"]


def body(scan):
    """The jaxpr that a scan repeats."""
    return scan.params["jaxpr"].jaxpr


def results(scan) -> tuple[list, list]:
    """(values that a scan carries, those that it stacks, which have a dimension more than its body
    makes). Parameters of the equation that say so differ between versions of JAX."""
    carried, stacked = [], []
    for outer, inner in zip(scan.outvars, body(scan).outvars, strict=True):
        (carried if outer.aval.shape == inner.aval.shape else stacked).append(outer)
    return carried, stacked


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of an operation, and how often it runs.

    Attributes:
      count: runs in a step.
      flops: of matrix products.
      bytes: read and written.
      kernel: `kernel_costs.kernel_name` of a Pallas kernel, else "".
    """

    count: int
    flops: float
    bytes: int
    kernel: str = ""


def costs(jaxpr, repeats: int = 1) -> Iterator[Cost]:
    """The costs of whatever is not fused away: products, kernels, reductions, gathers."""
    for op in operations(jaxpr):
        if op.name == "scan":
            yield from costs(body(op.equation), repeats * op.equation.params["length"])
        elif op.name in _WRITTEN | _REDUCTIONS:
            moved = [v.aval for v in (*op.equation.invars, *op.equation.outvars)]
            yield Cost(repeats, _flops(op.equation), sum(map(tiled_bytes, moved)), _kernel(op))


def _kernel(op: Operation) -> str:
    called_kernel = op.name == "pallas_call" and op.equation.params.get("name")
    return kernel_name(called_kernel) if called_kernel else ""


def _flops(equation) -> float:
    if equation.primitive.name == "pallas_call":
        if estimate := equation.params.get("cost_estimate"):
            return float(estimate.flops)
        queries = max((v.aval.shape for v in equation.invars), key=math.prod)
        return splash_flops(kernel_name(equation.params.get("name") or ""), queries)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
        return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
    return 0.0


def working_bytes(jaxpr, weights: set[tuple[int, ...]]) -> int:
    """The most bytes alive at once of what is written to memory.

    A value that is fused is made again where it is used, from what is written: that lives as long.

    Args:
      jaxpr: of a loop's body, or of a program; its arguments are not counted, nor its loops.
      weights: shapes of parameters: as operands they are copies that are counted elsewhere.
    """
    ops = operations(jaxpr)
    outside = set(jaxpr.invars)
    written: set = set()
    for op in ops:
        values = op.outputs if op.name in _WRITTEN | _REDUCTIONS else ()
        if op.name in _PRODUCTS or op.name == "pallas_call":
            values += tuple(v for v in op.inputs if v is not None and v not in outside)
        written |= {v for v in values if v.aval.shape not in weights}
    sources: dict = {}  # of each value, the written ones that it is made from
    last_use: dict = {}
    for i, op in enumerate(ops):
        read = set().union(*(sources.get(v, ()) for v in op.inputs if v is not None))
        last_use |= dict.fromkeys(read, i)
        for value in op.outputs:
            sources[value] = {value} if value in written else read
    alive = peak = 0
    ends: dict[int, int] = {}
    for i, op in enumerate(ops):
        if op.name not in _WRITTEN:  # what is fused can take the memory of what it uses last
            alive -= ends.pop(i, 0)
        for value in written & set(op.outputs):
            end, size = max(i, last_use.get(value, i)), tiled_bytes(value.aval)
            ends[end] = ends.get(end, 0) + size
            alive += size
        peak = max(peak, alive)
        alive -= ends.pop(i, 0)
    return peak


def tiled_bytes(aval) -> int:
    """Bytes of an array in HBM: its last dimension padded to lanes, another one to sublanes.

    The compiler chooses which other one by more than the padding, so this is a lower bound.
    """
    shape = [size for size in getattr(aval, "shape", ()) if size > 1]
    elements = math.prod(shape)
    if len(shape) >= 2:
        whole = lambda size, tile: -(-size // tile) * tile / size  # noqa: E731
        rows = min(whole(size, _SUBLANES) for size in shape[:-1])
        elements = int(elements * whole(shape[-1], _LANES) * rows)
    return elements * getattr(getattr(aval, "dtype", None), "itemsize", 0)
