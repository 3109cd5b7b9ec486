"""The one idiom for naming parts of a tree: a regular expression matched on the whole path.

`decoder/layers/mlp/.*` names every parameter of the MLPs. The same patterns serve weight decay,
schedules, freezing, sharding and loading.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

import jax

from jaxtpu.errors import ConfigError, nearest


def path_string(key_path: tuple) -> str:
    """A JAX key path as `decoder/layers/mlp/gate/kernel`."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by path."""
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def map_with_path(function, tree: Any, *rest: Any) -> Any:
    """`function(path, leaf, *other_leaves)` over the leaves of `tree`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_string(path), *leaves), tree, *rest
    )


def owner(path: str, known: Collection[str]) -> str | None:
    """The path in `known` that `path` ends with (`0/mu/head/kernel`: `head/kernel`), if one does."""
    words = path.split("/")
    return next((p for i in range(len(words)) if (p := "/".join(words[i:])) in known), None)


def matcher(field: str, patterns: Iterable[str], paths: Iterable[str]):
    """A predicate on paths: does any pattern match the whole of it?

    Args:
      field: config field that holds the patterns, for errors.
      patterns: regular expressions.
      paths: every path there is.

    Raises:
      ConfigError: a pattern that is not a regular expression, or that matches no path.
    """
    paths = list(paths)
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise ConfigError(
                field, pattern, f"is not a regular expression: {error}.", "Example: '.*/scale'."
            ) from None
        if not any(compiled[-1].fullmatch(path) for path in paths):
            names = dict.fromkeys(f".*/{path.rsplit('/', 1)[-1]}" for path in paths)
            raise ConfigError(field, pattern, "matches no parameter.", nearest(pattern, names))
    return lambda path: any(pattern.fullmatch(path) for pattern in compiled)
