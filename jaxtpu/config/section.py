"""Typed sections: dataclasses that check the name and the type of every assignment.

`ml_collections` refuses union types on the command line (a duration is `300` or `"5%"`) and
answers a wrong name with a traceback, so the checking is here; its `ConfigDict` is still accepted
from a config file (`jaxtpu.config.load`).
"""

import ast
import dataclasses
import difflib
import functools
import math
import operator
import sys
import types
import typing
import warnings
from typing import Any

from jaxtpu.config.duration import Duration, check_duration
from jaxtpu.errors import ConfigError, nearest

_LARGEST = 2**31 - 1  # sizes, seeds and counters are int32 on the devices
_EXAMPLES = {
    int: "Example: 8.",
    float: "Example: 0.1.",
    bool: "Example: true.",
    str: "Write a word.",
}


def option(
    default: Any,
    doc: str,
    *,
    choices: dict[str, str] | tuple[str, ...] = (),
    at_least=None,
    below=None,
):
    """A documented field of a `Section`.

    Args:
      default: default value.
      doc: what it is, with its unit; printed by `run.py help config`.
      choices: the values allowed; a dict maps each accepted spelling to the canonical one.
      at_least: the smallest value allowed.
      below: values from here up are not allowed.
    """
    if not isinstance(choices, dict):
        choices = {name: name for name in choices}
    metadata = {"doc": doc, "choices": choices, "at_least": at_least, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


def subsection(kind: type["Section"]):
    """A field that holds another section."""
    return dataclasses.field(default_factory=kind, metadata={"doc": kind.__doc__})


class Section:
    """Base of every section. Subclasses are dataclasses and name their place: `path="model"`.

    A section may have a `word`, the name of a flag in it: assigning the word to the section sets
    that flag, so that `mesh=auto` means `mesh.auto=true`.
    """

    path: typing.ClassVar[str] = ""
    word: typing.ClassVar[str] = ""

    def __init_subclass__(cls, path: str = "", word: str = "", **kwargs):
        super().__init_subclass__(**kwargs)
        cls.path, cls.word = path, word

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
            raise unknown_field(self, self, self.dotted(name), value)
        held = self.__dict__.get(name)
        if isinstance(held, Section) and held.word and value == held.word:
            return setattr(held, held.word, True)
        value = coerce(self.dotted(name), value, self.types()[name])
        metadata = fields[name].metadata
        if metadata.get("choices") and value is not None:
            value = _choose(self.dotted(name), value, metadata["choices"])
        if isinstance(value, (int, float)):
            _check_range(self.dotted(name), value, fields[name])
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:  # called only where the normal look-up failed
        if name.startswith("_"):
            raise AttributeError(name)
        raise unknown_field(self, self, self.dotted(name), "")

    def to_dict(self) -> dict[str, Any]:
        """The section as nested dicts of plain JSON values."""
        return dataclasses.asdict(self)

    def update(self, values: dict[str, Any]) -> None:
        """Assigns nested `values`; a key may be dotted, `train.steps`.

        Raises:
          ConfigError: unknown name or wrong type.
        """
        for key, value in values.items():
            name, _, rest = str(key).partition(".")
            value = {rest: value} if rest else value
            if name not in self.types():
                raise unknown_field(self, self, self.dotted(str(key)), value)
            current = getattr(self, name)
            is_word = isinstance(current, Section) and value == current.word
            if isinstance(current, Section) and not isinstance(value, Section) and not is_word:
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


def unknown_field(root: Section, section: Section, dotted: str, value: Any) -> ConfigError:
    """The error for a name that is no field, with the fields below `root` whose names are near it.

    Args:
      root: where the field that is meant may be.
      section: where the look-up ended.
    """
    names = _names(type(root))
    near = difflib.get_close_matches(dotted, names, n=1, cutoff=0.8)
    if not near:  # the right name in a wrong section
        last_words = {name.rsplit(".", 1)[-1] for name in names}
        words = difflib.get_close_matches(dotted.rsplit(".", 1)[-1], last_words, n=1, cutoff=0.7)
        near = [name for name in names if name.rsplit(".", 1)[-1] in words]
    has = f"{section.path or 'The top level'} has: {', '.join(section.types())}."
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else has
    return ConfigError(dotted, value, "there is no such field.", hint)


def _names(section: type[Section]) -> list[str]:
    """Dotted names of the fields and subsections, at any depth."""
    found = []
    for name, kind in section.types().items():
        found += [section.dotted(name), *(_names(kind) if _is_section(kind) else [])]
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _check_range(field: str, value: float, option: dataclasses.Field) -> None:
    minimum, limit = option.metadata.get("at_least"), option.metadata.get("below")
    if minimum is not None and value < minimum:
        raise ConfigError(field, value, f"must be at least {minimum}.", f"Use {minimum}.")
    if limit is not None and value >= limit:
        raise ConfigError(field, value, f"must be below {limit}.", f"Use {option.default}.")


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
        with warnings.catch_warnings():  # of a strange escape, or of a number run into a word
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
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
    if _is_section(kind):
        if not isinstance(value, kind):
            raise ConfigError(field, value, "this is a section; set its fields one by one.")
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and kind in (int, float):
        return _coerce_number(field, value, kind)
    if is_number and kind is str:
        return str(value)
    if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
        raise ConfigError(field, value, f"must be of type {kind.__name__}.", _EXAMPLES[kind])
    return value


def _coerce_number(field: str, value: int | float, kind: type) -> int | float:
    if not abs(value) <= sys.float_info.max:  # infinite, NaN, or an int that no float holds
        raise ConfigError(field, value, "must be finite.", _EXAMPLES[kind])
    if kind is float:
        return float(value)
    if abs(value) > _LARGEST:
        raise ConfigError(field, value, "does not fit into 32 bits.", f"Use at most {_LARGEST}.")
    if value != int(value):
        near = sorted({max(1, math.floor(value)), max(1, math.ceil(value))})
        suggestion = f"Use {' or '.join(map(str, near))}."
        raise ConfigError(field, value, "must be a whole number.", suggestion)
    return int(value)


def _without_none(kind: types.UnionType) -> list[type]:
    return [k for k in typing.get_args(kind) if k is not types.NoneType]


def _coerce_tuple(field: str, value: Any, item_kind: Any) -> tuple:
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    elif isinstance(value, (int, float)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(field, value, "must be a list.", "Example: ['a', 'b'], or () for none.")
    return tuple(coerce(field, item, item_kind) for item in value)
