"""Errors meant for the person who must act on them, with the exit codes that `run.py` ends with."""

import difflib
from collections.abc import Iterable
from typing import Any

EXIT_OK = 0
EXIT_CRASH = 1  # a bug in this project, or a failure that nothing here expected
EXIT_BAD_CONFIG = 2  # the configuration or the command line is wrong; nothing was started
EXIT_HUNG = 4  # the watchdog ended a process that waited too long; start it again
EXIT_NOT_SAVED = 5  # the last checkpoint of the run could not be written


class UserError(Exception):
    """What was wrong, where, and what would work. Shown without a traceback.

    Attributes:
      exit_code: what the process ends with.
    """

    exit_code = EXIT_CRASH


class ConfigError(UserError):
    """A field of the configuration (or a command line argument) has a value that cannot work.

    Args:
      field: dotted name, as the user writes it: `model.heads`.
      value: the offending value.
      problem: why it cannot work.
      suggestion: a value or spelling that would work.
    """

    exit_code = EXIT_BAD_CONFIG

    def __init__(self, field: str, value: Any, problem: str, suggestion: str = ""):
        self.field, self.value, self.problem, self.suggestion = field, value, problem, suggestion
        super().__init__(f"{field}={value!r}: {problem}" + (f" {suggestion}" if suggestion else ""))


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence that offers the nearest spelling of `word`, or all `choices` where none is near."""
    choices = list(choices)
    match = difflib.get_close_matches(word.lower(), choices, n=1)
    return f"Did you mean {match[0]!r}?" if match else f"Choose from: {', '.join(choices)}."


def nearest_multiples(value: int, divisor: int) -> str:
    """A sentence that offers the multiples of `divisor` on both sides of `value`."""
    below, above = value // divisor * divisor, -(-value // divisor) * divisor
    values = sorted({n for n in (below, above) if n > 0})
    return f"Use {' or '.join(map(str, values))}."
