"""Small scheduled HLO modules, written as the TPU compiler prints them."""

from jaxtpu.plan.hlo import Module, parse_hlo

MIB = 2**20
ARRAY = "f32[256,1024]{1,0:T(8,128)}"  # one MiB
TWO = f"({ARRAY}, {ARRAY})"


def module(entry: str, head: str = "", computations: str = "") -> Module:
    """A module of the lines `entry`; `head` goes to its first line, `computations` before it."""
    header = "HloModule jit_f, is_scheduled=true" + (f", {head}" if head else "")
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return parse_hlo(
        f"{header}\n\n{computations}\n\nENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n"
    )


def computation(name: str, lines: str) -> str:
    """A computation of `lines`."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return f"%{name} (p: f32[1]) -> f32[1] {{\n{body}\n}}\n"
