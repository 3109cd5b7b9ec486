"""What the compiler says of a program that it does not compile."""

import dataclasses
import re
import traceback

from jaxtpu.errors import ConfigError, UserError
from jaxtpu.plan.compile_cache import CompileResult, libtpu_versions

_LONGEST_LINE, _LONGEST_MESSAGE = 500, 20_000
# The two ways in which libtpu 0.0.42.1 and 0.0.50.1 say that memory is short: an early one, before
# the program is scheduled, and a late one, with a list of the largest allocations.
_TOO_LARGE = re.compile(
    r"RESOURCE_EXHAUSTED.*?"
    r"(?:total memory required[^()]*\(|memory space hbm\. Used )(\d+(?:\.\d+)?)([BKMGT]?)",
    re.DOTALL,
)
_UNITS = {"": 0, "B": 0, "K": 10, "M": 20, "G": 30, "T": 40}
# What the compiler will say again; anything else may be the machine's fault.
_LASTING = re.compile(r"INVALID_ARGUMENT|UNIMPLEMENTED|RESOURCE_EXHAUSTED|INTERNAL: Mosaic")


def failure(error: str, message: str = "", field: str = "") -> CompileResult:
    """The result of a program that has none, for the reason `error`."""
    return CompileResult(
        versions=libtpu_versions(),
        error=error[:_LONGEST_LINE],
        field=field,
        message=message[:_LONGEST_MESSAGE],
    )


def explain(error: Exception) -> CompileResult:
    """The result of a program that was not compiled because of `error`."""
    if isinstance(error, UserError):
        return failure(str(error), field=error.field if isinstance(error, ConfigError) else "")
    text = str(error).strip()
    if too_large := _TOO_LARGE.match(text):
        amount, unit = too_large.groups()
        needed = round(float(amount) * 2 ** _UNITS[unit])
        return dataclasses.replace(failure("", text), needed_bytes=needed)
    line = text.partition("\n")[0]
    if is_lasting(error):
        return failure(line, text)
    trace = "".join(traceback.format_exception(error))[-_LONGEST_MESSAGE:]
    return failure(f"{type(error).__name__}: {line}", trace)


def is_lasting(error: Exception) -> bool:
    """Whether the same request would fail again, so that the answer may be kept."""
    return isinstance(error, ConfigError) or bool(_LASTING.match(str(error)))
