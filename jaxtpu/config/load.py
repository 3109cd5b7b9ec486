"""From a command line to a `Config`: the config file, its argument, and dotted overrides."""

import collections
import difflib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import traceback
import types
from typing import Any

from jaxtpu.config.schema import Config, MeshConfig
from jaxtpu.config.section import Section, parse_literal, unknown_field
from jaxtpu.config.validate import MESH_AXES
from jaxtpu.errors import ConfigError

_OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_SPEC = re.compile(r"(.*?\.(?:py|json))(?::(.*))?", re.DOTALL)
_FLAG_WORDS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def split_arguments(argv: list[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """Splits a command line as `ml_collections.config_flags` does.

    `--config=FILE[:ARG]`, `--config.a.b=value`, `--config.a.b value`, `--config.flag` and
    `--noconfig.flag` are taken.

    Returns:
      The config file with its argument, the overrides as (dotted name, text), and what is left.
    """
    spec, overrides, rest = None, [], []
    words = collections.deque(argv)
    while words:
        word = words.popleft()
        match = _OVERRIDE.fullmatch(word)
        if word in ("--config", "-config"):
            spec = words.popleft() if words else ""
        elif word.startswith(("--config=", "-config=")):
            spec = word.split("=", 1)[1]
        elif match is None:
            rest.append(word)
        else:
            negated, name, text = match.groups()
            if negated:
                text = _negated(name, text)
            elif text is None:
                text = _next_value(name, words)
            overrides.append((name, text))
    return spec, overrides, rest


def _negated(name: str, text: str | None) -> str:
    if not _is_flag(name):
        raise ConfigError(
            name, "", "--noconfig is for fields that are true or false.",
            f"Write --config.{name}=VALUE.",
        )  # fmt: skip
    if text is not None:
        raise ConfigError(name, text, "--noconfig takes no value.", f"Write --noconfig.{name}.")
    return "false"


def _next_value(name: str, words: collections.deque[str]) -> str:
    """The value of `--config.NAME` without an equals sign: the next word, but for a flag."""
    following = words[0] if words and not words[0].startswith("--") else None
    if _is_flag(name, following or ""):
        return "true"
    if following is None:
        raise ConfigError(name, "", "has no value.", f"Write --config.{name}=VALUE.")
    return words.popleft()


def _is_flag(name: str, text: str = "") -> bool:
    section, field = _find(Config(), name, text)
    return section.types()[field] is bool


def _find(config: Config, dotted: str, text: str) -> tuple[Section, str]:
    """The section that holds the field called `dotted`, and the field's own name.

    Raises:
      ConfigError: there is none; the value `text` is named.
    """
    *parents, field = dotted.split(".")
    section: Section = config
    for parent in parents:
        if parent not in section.types():
            raise unknown_field(config, section, dotted, parse_literal(text))
        inner = getattr(section, parent)
        if not isinstance(inner, Section):
            name = section.dotted(parent)
            raise ConfigError(
                dotted, text, f"{name} is a field, not a section.", f"Write --config.{name}=VALUE."
            )
        section = inner
    if field not in section.types():
        raise unknown_field(config, section, dotted, parse_literal(text))
    return section, field


def leaves(section: Section) -> list[tuple[str, Any]]:
    """(dotted name, value) of every field, subsections flattened."""
    found = []
    for name in section.types():
        value = getattr(section, name)
        found += leaves(value) if isinstance(value, Section) else [(section.dotted(name), value)]
    return found


def apply_overrides(config: Config, overrides: list[tuple[str, str]]) -> None:
    """Sets fields to what the command line says; see `load`."""
    lists: dict[str, tuple] = {}
    for name, text in overrides:
        section, field = _find(config, name, text)
        section.update({field: _parse(text, section.types()[field])})
        value = getattr(section, field)
        if isinstance(value, tuple):
            lists[name] = lists.get(name, ()) + value
            setattr(section, field, lists[name])


def load(spec: str, overrides: list[tuple[str, str]] = ()) -> Config:
    """The configuration that a file gives, with `overrides` applied, checked field by field.

    Args:
      spec: a Python file with `get_config()`, or `get_config(arg)` written `FILE:ARG`; or the
        `config.json` that a run left.
      overrides: (dotted name, text) as from `split_arguments`. The last of two settings of a field
        wins, but those of a list are joined, as in `config_flags`.

    Raises:
      ConfigError: the file is missing or fails; a field is unknown or has a wrong type.
    """
    path, argument = _split_spec(spec)
    if path.suffix == ".json":
        config = Config()
        config.update(_read_json(path))
    else:
        config = _call_get_config(path, argument)
    apply_overrides(config, overrides)
    if config.mesh.auto:  # what only the file sets of a mesh is left to the plan
        given, defaults = {name for name, _ in overrides}, MeshConfig()
        open_axes = [axis for axis in MESH_AXES if f"mesh.{axis}" not in given]
        config.mesh.update({axis: getattr(defaults, axis) for axis in open_axes})
    config.name = config.name or "-".join(filter(None, (path.stem, argument)))
    if config.name in (".", "..") or set("/\\\0") & set(config.name):
        raise ConfigError(
            "name",
            config.name,
            "names a folder, so it cannot be a path.",
            "For example: name=trial_1",
        )
    config.workdir = config.workdir or f"runs/{config.name}"
    return config


def _parse(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return _FLAG_WORDS.get(text.lower(), text)
    return parse_literal(text)


def _split_spec(spec: str) -> tuple[pathlib.Path, str | None]:
    """The config file and its argument, None where there is no colon."""
    match = _SPEC.fullmatch(spec)
    path = pathlib.Path(match[1] if match else spec)
    if match and os.path.isfile(path):
        return path, match[2]
    folders = {pathlib.Path("configs"), path.parent} - {pathlib.Path()}
    known = {p.stem: str(p) for folder in sorted(folders) for p in sorted(folder.glob("*.py"))}
    near = difflib.get_close_matches(path.stem, known, n=1, cutoff=0.5)
    there_are = f"There are: {', '.join(known.values()) or 'none'}."
    problem = "there is no such file." if match else "is not a config file (.py or .json)."
    raise ConfigError(
        "--config", spec, problem, f"Did you mean {known[near[0]]!r}?" if near else there_are
    )


def _read_json(path: pathlib.Path) -> dict:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            "--config", str(path), f"cannot be read: {error}.", "Use the run's Python file instead."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            "--config", str(path), f"holds a {type(values).__name__}, not a configuration.",
            "Use the run's Python file instead.",
        )  # fmt: skip
    return values


def _call_get_config(path: pathlib.Path, argument: str | None) -> Config:
    """Runs the file's `get_config`, which may return a `Config`, a `ConfigDict` or a dict."""
    spec = importlib.util.spec_from_file_location(f"jaxtpu_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return _as_config(path, _get_config_of(path, module, argument)())
    except ConfigError as error:
        if line := _line(error, spec.origin):
            place = f"({path}, line {line})"
            error = ConfigError(
                error.field, error.value, error.problem, f"{error.suggestion} {place}".strip()
            )
        raise error from None
    except Exception as error:  # any fault of the user's own file, told with its line
        line = _line(error, spec.origin)
        place = f"line {line}: " if line else ""
        message = " ".join(str(error).split())
        raise ConfigError(
            "--config", str(path), f"{place}{type(error).__name__}: {message}"
        ) from error


def _line(error: Exception, filename: str) -> int | None:
    """The line of the file that `error` came from; None where it is not from there."""
    if isinstance(error, SyntaxError) and error.filename == filename:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == filename), None)


def _get_config_of(path: pathlib.Path, module: types.ModuleType, argument: str | None):
    """The file's `get_config` with its argument, ready to be called."""
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(
            "--config", str(path), "defines no get_config().", "Example: configs/quickstart.py."
        )
    arguments = [] if argument is None else [argument]
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        takes, write = ("no argument", "") if arguments else ("an argument", ":ARGUMENT")
        raise ConfigError(
            "--config", f"{path}:{argument}" if arguments else str(path),
            f"get_config() takes {takes}.", f"Write --config={path}{write}.",
        ) from None  # fmt: skip
    return lambda: get_config(*arguments)


def _as_config(path: pathlib.Path, result: Any) -> Config:
    if isinstance(result, Config):
        return result
    values = result.to_dict() if hasattr(result, "to_dict") else result
    if not isinstance(values, dict):
        raise ConfigError(
            "--config", str(path), f"get_config() returned {type(result).__name__}.",
            "Return a jaxtpu.config.Config or an ml_collections.ConfigDict.",
        )  # fmt: skip
    config = Config()
    config.update(values)
    return config
