"""Options of a verb: parsed, typed, and a wrong one answered with the nearest."""

import argparse

from jaxtpu.config import Config, leaves
from jaxtpu.config.section import coerce, parse_literal
from jaxtpu.errors import ConfigError, nearest


def parse(words: list[str], kinds: dict[str, type]) -> dict:
    """Options of one verb, by name without dashes; an unknown one is answered with the nearest."""
    parser = argparse.ArgumentParser(
        prog="run.py", add_help=False, allow_abbrev=False, exit_on_error=False
    )
    for name in kinds:
        parser.add_argument(name)
    try:
        options, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        name = str(error.argument_name)
        raise ConfigError(name, "", f"{error.message}.", f"Write {name}=VALUE.") from None
    if unknown:
        raise _unknown_option(unknown[0], kinds)
    given = vars(options)
    return {
        name.lstrip("-"): _as_kind(name, given[name.lstrip("-")], kind)
        for name, kind in kinds.items()
    }


def _as_kind(name: str, text: str | None, kind: type):
    return text if text is None or kind is str else coerce(name, parse_literal(text), kind)


def _unknown_option(word: str, kinds: dict[str, type]) -> ConfigError:
    name = word.split("=")[0]
    if hint := meant_as_config(word):
        return ConfigError("run.py", word, "is not an option here.", hint)
    if not word.startswith("-"):
        return ConfigError(
            "run.py", word, "is not an option.", "Write a field as --config.FIELD=VALUE."
        )
    options = [*kinds, "--config"]
    return ConfigError(name, word, "is not an option here.", nearest(name.split(".")[0], options))


def meant_as_config(word: str) -> str:
    """What to write for a config file, or a field of one, that was given without `--config`."""
    if word.split(":")[0].endswith((".py", ".json")) and not word.startswith("-"):
        return f"Did you mean --config={word}?"
    field = word.lstrip("-").removeprefix("config.")
    if field.split("=")[0] in dict(leaves(Config())):
        return f"Did you mean --config.{field}?"
    return ""
