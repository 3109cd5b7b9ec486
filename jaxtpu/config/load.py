"""From a command line to a `Config`: the config file, its argument, and dotted overrides."""

import difflib
import importlib.util
import json
import pathlib
import re
import sys
import traceback
from typing import Any

from jaxtpu.config.schema import Config
from jaxtpu.config.section import Section, parse_literal
from jaxtpu.errors import ConfigError

_OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def split_arguments(argv: list[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """Splits a command line as `ml_collections.config_flags` does.

    `--config=FILE[:ARG]`, `--config.a.b=value`, `--config.a.b value`, `--config.flag` and
    `--noconfig.flag` are taken; the last of two settings of a field wins.

    Returns:
      The config file with its argument, the overrides as (dotted name, text), and what is left.
    """
    spec, overrides, rest = None, [], []
    words = iter(argv)
    for word in words:
        match = _OVERRIDE.fullmatch(word)
        if word in ("--config", "-config"):
            spec = next(words, "")
        elif word.startswith(("--config=", "-config=")):
            spec = word.split("=", 1)[1]
        elif match is None:
            rest.append(word)
        else:
            negated, name, text = match.groups()
            if negated:
                text = "false"
            elif text is None:
                text = "true" if _is_flag(name) else next(words, None)
            if text is None:
                raise ConfigError(name, "", "has no value.", f"Write --config.{name}=VALUE.")
            overrides.append((name, text))
    return spec, overrides, rest


def _is_flag(name: str) -> bool:
    section, field = _find(Config(), name)
    return section.types()[field] is bool


def _find(config: Config, dotted: str) -> tuple[Section, str]:
    """The section that holds the field called `dotted`, and the field's own name."""
    *parents, field = dotted.split(".")
    section: Any = config
    for parent in parents:
        section = getattr(section, parent)
        if not isinstance(section, Section):
            raise ConfigError(dotted, "", f"{parent} is a value, not a section.")
    if field not in section.types():
        everywhere = [name for name, _ in leaves(config)]
        near = difflib.get_close_matches(dotted, everywhere, n=1)
        same_name = [name for name in everywhere if name.split(".")[-1] == field]
        best = same_name or near
        hint = f"Did you mean {best[0]!r}?" if best else f"It has: {', '.join(section.types())}."
        raise ConfigError(dotted, "", "there is no such field.", hint)
    return section, field


def leaves(section: Section) -> list[tuple[str, Any]]:
    """(dotted name, value) of every field, subsections flattened."""
    found = []
    for name in section.types():
        value = getattr(section, name)
        found += leaves(value) if isinstance(value, Section) else [(section.dotted(name), value)]
    return found


def load(spec: str, overrides: list[tuple[str, str]] = ()) -> Config:
    """The configuration that a file gives, with `overrides` applied, checked field by field.

    Args:
      spec: a Python file with `get_config()`, or `get_config(arg)` written `FILE:ARG`; or the
        `config.json` that a run left.
      overrides: (dotted name, text) as from `split_arguments`.

    Raises:
      ConfigError: the file is missing or fails; a field is unknown or has a wrong type.
    """
    path, argument = _split_spec(spec)
    config = Config()
    if path.suffix == ".json":
        config.update(_read_json(path))
    else:
        config = _call_get_config(path, argument)
    for name, text in overrides:
        section, field = _find(config, name)
        is_text = section.types()[field] is str
        section.update({field: text if is_text else parse_literal(text)})
    config.name = config.name or "-".join(filter(None, (path.stem, argument)))
    config.workdir = config.workdir or f"runs/{config.name}"
    return config


def _split_spec(spec: str) -> tuple[pathlib.Path, str]:
    match = re.fullmatch(r"(.*\.(?:py|json))(?::(.*))?", spec)
    path = pathlib.Path(match[1] if match else spec)
    if not match or not path.is_file():
        known = [str(p) for p in sorted(pathlib.Path("configs").glob("*.py"))]
        near = difflib.get_close_matches(str(path), known, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known) or 'none'}."
        raise ConfigError("--config", spec, "is not a config file (.py or .json).", hint)
    return path, match[2] or ""


def _read_json(path: pathlib.Path) -> dict:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError("--config", str(path), f"is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ConfigError("--config", str(path), "does not hold a configuration.")
    return values


def _call_get_config(path: pathlib.Path, argument: str) -> Config:
    """Runs the file's `get_config`, which may return a `Config`, a `ConfigDict` or a dict."""
    spec = importlib.util.spec_from_file_location(f"jaxtpu_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError("--config", str(path), "defines no get_config().")
        result = module.get_config(*([argument] if argument else []))
    except ConfigError:
        raise
    except Exception as error:  # any fault of the user's own file, told with its line
        frames = traceback.extract_tb(sys.exc_info()[2])
        lines = [f.lineno for f in frames if f.filename == str(path)] or [0]
        raise ConfigError(
            "--config", str(path), f"line {lines[-1]}: {type(error).__name__}: {error}"
        ) from error
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
