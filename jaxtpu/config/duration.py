"""Durations: an amount of training in steps, epochs, examples, tokens or percent of the run."""

import dataclasses
import difflib
import math
import re
from typing import Any

from jaxtpu.errors import ConfigError

Duration = int | str

LARGEST_STEP = 2**31 - 1  # the step counter is an int32

_PATTERN = re.compile(r"\s*(-?[0-9._]+(?:[eE][+-]?[0-9]+)?)\s*([kKMBGT]?)\s*([a-zA-Z%]*)\s*")
_SCALES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_UNITS = {
    **dict.fromkeys(("", "step", "steps"), "steps"),
    **dict.fromkeys(("epoch", "epochs"), "epochs"),
    **dict.fromkeys(("example", "examples"), "examples"),
    **dict.fromkeys(("token", "tokens"), "tokens"),
    **dict.fromkeys(("%", "percent"), "percent"),
}
_EXAMPLES = "Use 300, '2 epochs', '1e6 examples', '10B tokens', or '5%' of the run."


@dataclasses.dataclass(frozen=True)
class RunUnits:
    """What one step of a run amounts to.

    Attributes:
      steps: steps of the whole run; None while that is what is being worked out.
      steps_per_epoch: steps in one epoch; None where the data set's size is not known.
      batch_size: examples (sequences) a step.
      tokens_per_step: tokens a step.
    """

    steps: int | None
    steps_per_epoch: int | None
    batch_size: int
    tokens_per_step: int


def parse_duration(field: str, value: Duration) -> tuple[float, str]:
    """(amount, unit) of `value`, unit one of steps, epochs, examples, tokens, percent.

    Raises:
      ConfigError: not a duration; `field` is named.
    """
    is_amount = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    match = _PATTERN.fullmatch(str(value)) if is_amount else None
    if not match:
        raise ConfigError(field, value, "is not a duration.", _EXAMPLES)
    number, scale, unit = match.groups()
    if unit not in _UNITS:
        raise _unknown_unit(field, value, number, scale + unit)
    try:
        amount = float(number) * _SCALES[scale]
    except ValueError:  # such as 1.2.3
        amount = math.nan
    if not math.isfinite(amount):
        raise ConfigError(field, value, "is not a duration.", _EXAMPLES)
    if amount < 0:
        raise ConfigError(field, value, "is negative.", _EXAMPLES)
    return amount, _UNITS[unit]


def _unknown_unit(field: str, value: Duration, number: str, word: str) -> ConfigError:
    near = difflib.get_close_matches(word.lower(), _UNITS, n=1, cutoff=0.7)
    if near:
        suggestion = f"Did you mean '{number} {near[0]}'?"
    elif word.upper() in _SCALES:
        suggestion = f"Did you mean '{number}{word.upper()}'?"
    else:
        suggestion = f"Choose from: {', '.join(dict.fromkeys(_UNITS.values()))}."
    return ConfigError(field, value, f"{word!r} is not a unit of duration.", suggestion)


def check_duration(field: str, value: Any) -> Duration:
    """`value` unchanged where it is a duration (an integral float becomes an int)."""
    parse_duration(field, value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def to_steps(field: str, value: Duration, run: RunUnits) -> int:
    """`value` in whole steps: 0 stays 0 (never, or none), anything more is at least 1.

    Raises:
      ConfigError: percent of a run of unknown length, epochs of a data set of unknown size, or
        more steps than can be counted.
    """
    amount, unit = parse_duration(field, value)
    if unit == "percent" and run.steps is None:
        raise ConfigError(
            field,
            value,
            "the length of the run cannot be a percentage of itself.",
            "Use 1000, or '2 epochs'.",
        )
    if unit == "epochs" and run.steps_per_epoch is None:
        raise ConfigError(
            field,
            value,
            "the size of the data set is not known, so an epoch has no length.",
            "Set train.steps_per_epoch.",
        )
    steps = {
        "steps": lambda: amount,
        "epochs": lambda: amount * run.steps_per_epoch,
        "examples": lambda: amount / run.batch_size,
        "tokens": lambda: amount / run.tokens_per_step,
        "percent": lambda: amount / 100 * run.steps,
    }[unit]()
    if steps > LARGEST_STEP:
        raise ConfigError(
            field,
            value,
            f"that is {steps:.4g} steps, and no more than {LARGEST_STEP} can be counted.",
            "Give the unit: '10B tokens', for example." if unit == "steps" else "Use less.",
        )
    return max(1, round(steps)) if amount else 0
