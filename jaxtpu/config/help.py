"""`run.py help config`: the schema as text, printed from where it is defined."""

import dataclasses
import textwrap

from jaxtpu.config.schema import Config
from jaxtpu.config.section import Section

_DURATIONS = """\
Durations are written 300 (steps), "2 epochs", "1e6 examples", "10B tokens" or "5%" (of the run).
Set a field with --config.NAME=VALUE, or in a config file with config.NAME = VALUE.
"""


def config_help() -> str:
    """Every field with its type, default and meaning."""
    return _DURATIONS + "".join(_section_help(Config()))


def _section_help(section: Section) -> list[str]:
    blocks = []
    title = section.path or "top level"
    blocks.append(f"\n{title}: {type(section).__doc__.strip()}\n")
    nested = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            nested += _section_help(value)
            continue
        kind = section.types()[field.name]
        kind = getattr(kind, "__name__", None) or str(kind)
        if "int | str" in str(section.types()[field.name]):
            kind = "duration"
        text = f"{field.metadata['doc']} ({kind}, default {value!r})"
        if choices := field.metadata["choices"]:
            text += f"; one of {', '.join(choices)}"
        blocks.append(
            textwrap.fill(text, 100, initial_indent=f"  {section.dotted(field.name)}: ",
                          subsequent_indent="      ") + "\n"
        )  # fmt: skip
    return blocks + nested
