"""Typed sections: dataclasses that check the name and the type of every assignment.

`ml_collections` refuses union types on the command line (a duration is `300` or `"5%"`) and
answers a wrong name with a traceback, so the checking is here; its `ConfigDict` is still accepted
from a config file (`jaxtpu.config.load`).
"""

import ast
import dataclasses
import functools
import operator
import types
import typing
from typing import Any

from jaxtpu.config.duration import Duration, check_duration
from jaxtpu.errors import ConfigError, nearest


def option(
    default: Any, doc: str, *, choices: dict[str, str] | tuple[str, ...] = (), at_least=None
):
    """A documented field of a `Section`.

    Args:
      default: default value.
      doc: what it is, with its unit; printed by `run.py help config`.
      choices: the values allowed; a dict maps each accepted spelling to the canonical one.
      at_least: the smallest value allowed.
    """
    if not isinstance(choices, dict):
        choices = {name: name for name in choices}
    metadata = {"doc": doc, "choices": choices, "at_least": at_least}
    return dataclasses.field(default=default, metadata=metadata)


def subsection(kind: type["Section"]):
    """A field that holds another section."""
    return dataclasses.field(default_factory=kind, metadata={"doc": kind.__doc__})


class Section:
    """Base of every section. Subclasses are dataclasses and name their place: `path="model"`."""

    path: typing.ClassVar[str] = ""

    def __init_subclass__(cls, path: str = "", **kwargs):
        super().__init_subclass__(**kwargs)
        cls.path = path

    @classmethod
    def types(cls) -> dict[str, Any]:
        """The type of each field, by name."""
        hints = typing.get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls)}

    @classmethod
    def dotted(cls, name: str) -> str:
        return f"{cls.path}.{name}" if cls.path else name

    def __setattr__(self, name: str, value: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(self)}
        if name not in fields:
            raise ConfigError(
                self.dotted(name), value, "there is no such field.", nearest(name, fields)
            )
        value = coerce(self.dotted(name), value, self.types()[name])
        metadata = fields[name].metadata
        if metadata.get("choices") and value is not None:
            value = _choose(self.dotted(name), value, metadata["choices"])
        minimum = metadata.get("at_least")
        if minimum is not None and isinstance(value, (int, float)) and value < minimum:
            raise ConfigError(
                self.dotted(name), value, f"must be at least {minimum}.", f"Use {minimum}."
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:  # called only where the normal look-up failed
        if name.startswith("__"):
            raise AttributeError(name)
        names = [field.name for field in dataclasses.fields(self)]
        raise ConfigError(
            self.dotted(name), "<read>", "there is no such field.", nearest(name, names)
        )

    def to_dict(self) -> dict[str, Any]:
        """The section as nested dicts of plain JSON values."""
        return dataclasses.asdict(self)

    def update(self, values: dict[str, Any]) -> None:
        """Assigns nested `values`; unknown names and wrong types raise `ConfigError`."""
        for name, value in values.items():
            current = getattr(self, name)
            if isinstance(current, Section) and not isinstance(value, Section):
                if not hasattr(value, "items"):
                    raise ConfigError(
                        self.dotted(name),
                        value,
                        "this is a section; set one of its fields.",
                        f"For example {self.dotted(name)}.{next(iter(current.types()))}.",
                    )
                current.update(value)
            else:
                setattr(self, name, value)


def _choose(field: str, value: Any, choices: dict[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(_choose(field, item, choices) for item in value)
    if value not in choices:
        raise ConfigError(field, value, "is not a known name.", nearest(str(value), choices))
    return choices[value]


def parse_literal(text: str) -> Any:
    """A command line word as a Python value; a word that is no literal stays a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return text


def coerce(field: str, value: Any, kind: Any) -> Any:
    """`value` as type `kind`, by the conversions that lose nothing.

    An int becomes a float, an integral float (`1e6`) an int, a list a tuple, a single string a
    tuple of one.

    Raises:
      ConfigError: any other type.
    """
    if kind == Duration:
        return check_duration(field, value)
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        return coerce(field, value, functools.reduce(operator.or_, _without_none(kind)))
    if typing.get_origin(kind) is tuple:
        return _coerce_tuple(field, value, typing.get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, Section):
        if not isinstance(value, kind):
            raise ConfigError(field, value, "this is a section; set its fields one by one.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    wrong_bool = isinstance(value, bool) and kind is not bool
    if wrong_bool or not isinstance(value, kind) or value != value:
        example = {int: "8", float: "0.1", bool: "true", str: "a word"}.get(kind, "")
        raise ConfigError(field, value, f"must be of type {kind.__name__}.", f"Example: {example}.")
    return value


def _without_none(kind: types.UnionType) -> list[type]:
    return [k for k in typing.get_args(kind) if k is not types.NoneType]


def _coerce_tuple(field: str, value: Any, item_kind: Any) -> tuple:
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(field, value, "must be a list.", f"Example: [{value!r}].")
    return tuple(coerce(field, item, item_kind) for item in value)
