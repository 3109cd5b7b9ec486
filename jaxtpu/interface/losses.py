"""Losses and metrics by their Keras names, or plain functions: (targets, outputs) -> values."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtpu.errors import ConfigError, nearest
from jaxtpu.kernels.cross_entropy import cross_entropy

# (targets, outputs) -> a value for each example, or for each of its parts.
ValueFunction = Callable[[Any, Any], jax.Array]


def _same_shape(targets: jax.Array, outputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both of one shape: [B] and [B, 1] would be broadcast to [B, B]."""
    if targets.ndim == outputs.ndim - 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    if targets.shape != outputs.shape:
        raise ConfigError(
            "loss", f"targets {targets.shape}, outputs {outputs.shape}",
            "this loss compares arrays of one shape.",
            "For class numbers, use sparse_categorical_crossentropy.",
        )  # fmt: skip
    return targets, outputs


def _classes(targets: jax.Array, outputs: jax.Array) -> jax.Array:
    """Class numbers without a last dimension of 1, which Keras lets stand."""
    if targets.ndim == outputs.ndim and targets.shape[-1] == 1:
        targets = targets[..., 0]
    if targets.shape != outputs.shape[:-1]:
        raise ConfigError(
            "loss", f"targets {targets.shape}, outputs {outputs.shape}",
            "outputs have one more dimension than class numbers: a logit for each class.",
            "For one-hot targets, use categorical_crossentropy.",
        )  # fmt: skip
    return targets.astype(jnp.int32)


def _sparse(targets, outputs):
    return cross_entropy(outputs, _classes(targets, outputs))


def _categorical(targets, outputs):
    return cross_entropy(outputs, _same_shape(targets, outputs)[0])


def _binary(targets, outputs):
    targets, outputs = _same_shape(targets, outputs)
    return optax.sigmoid_binary_cross_entropy(outputs.astype(jnp.float32), targets)


def _squared(targets, outputs):
    targets, outputs = _same_shape(targets, outputs)
    return (outputs.astype(jnp.float32) - targets) ** 2


def _absolute(targets, outputs):
    targets, outputs = _same_shape(targets, outputs)
    return jnp.abs(outputs.astype(jnp.float32) - targets)


def _accuracy(targets, outputs):
    if outputs.shape[-1] == 1 or outputs.ndim == 1:  # one logit: is it this class?
        targets, outputs = _same_shape(targets.reshape(outputs.shape), outputs)
        return (outputs > 0) == (targets > 0.5)
    if targets.shape == outputs.shape:
        targets = jnp.argmax(targets, axis=-1)
    return jnp.argmax(outputs, axis=-1) == _classes(targets, outputs)


def _top_5(targets, outputs):
    targets = _classes(targets, outputs)
    own = jnp.take_along_axis(outputs, targets[..., None], axis=-1)
    return jnp.sum(outputs > own, axis=-1) < 5


LOSSES: dict[str, ValueFunction] = {
    "sparse_categorical_crossentropy": _sparse,
    "categorical_crossentropy": _categorical,
    "binary_crossentropy": _binary,
    "mean_squared_error": _squared,
    "mse": _squared,
    "mean_absolute_error": _absolute,
    "mae": _absolute,
}
METRICS: dict[str, ValueFunction] = {
    "accuracy": _accuracy,
    "top_5_accuracy": _top_5,
    **LOSSES,
}


def values_by_name(loss: str | ValueFunction, metrics: Sequence[str | ValueFunction]):
    """(outputs, targets) -> the value of each example, float32 [B], by name; the loss is `loss`.

    Raises:
      ConfigError: a name that is not known, or used twice; later, a function whose result is no
        value for each example.
    """
    functions = {"loss": _function("loss", loss, LOSSES)}
    for metric in metrics:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
        if name in functions:
            raise ConfigError("metrics", name, "is there twice.", "Give each another name.")
        functions[name] = _function("metrics", metric, METRICS)

    def values(outputs: Any, targets: Any) -> dict[str, jax.Array]:
        rows = jax.tree.leaves(targets)[0].shape[0]
        return {
            name: _of_examples(name, function(targets, outputs), rows)
            for name, function in functions.items()
        }

    return values


def _function(field: str, given: str | ValueFunction, known: dict[str, ValueFunction]):
    if callable(given):
        return given
    if given not in known:
        hint = f"{nearest(str(given), known)} Or give a function of (targets, outputs)."
        raise ConfigError(field, given, "is not a known name.", hint)
    return known[given]


def _of_examples(name: str, value: Any, rows: int) -> jax.Array:
    """The mean of each example's values, [B]."""
    shape = getattr(value, "shape", ())
    if shape[:1] != (rows,):
        raise ConfigError(
            name, f"shape {tuple(shape)}", f"must be a value for each of the {rows} examples, so "
            "that padding does not count.",
            "For example: lambda targets, outputs: jnp.mean((outputs - targets) ** 2, axis=-1)",
        )  # fmt: skip
    return jnp.mean(value.astype(jnp.float32).reshape(rows, -1), axis=-1)
