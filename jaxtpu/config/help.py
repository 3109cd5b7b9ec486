"""`run.py help config`: the schema as text, printed from where it is defined."""

import dataclasses
import inspect
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
    blocks.append(f"\n{title}: {inspect.cleandoc(type(section).__doc__)}\n")
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
        text = f"{section.dotted(field.name)}: {field.metadata['doc']} "
        text += f"({kind}, default {value!r}{_range(field)})"
        if choices := field.metadata["choices"]:
            text += f"; one of {', '.join(choices)}"
        indents = {"initial_indent": "  ", "subsequent_indent": "      "}
        blocks.append(textwrap.fill(text, 100, break_on_hyphens=False, **indents) + "\n")
    return blocks + nested


def _range(field: dataclasses.Field) -> str:
    limits = {"at least": field.metadata["at_least"], "below": field.metadata["below"]}
    return "".join(f", {word} {limit}" for word, limit in limits.items() if limit is not None)
