"""Batches of one's own on the mesh: any iterable, any size, padded rows of weight 0."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtpu.errors import ConfigError
from jaxtpu.sharding import Rules


def passes(dataset: Any) -> Iterator[Iterable[Any]]:
    """The dataset's passes, one after the other: one only, if it is an iterator.

    Args:
      dataset: a `tf.data.Dataset`, an iterable, or a function that returns one.
    """
    while True:
        made = dataset() if callable(dataset) else dataset
        if hasattr(made, "as_numpy_iterator"):
            made = made.as_numpy_iterator()
        elif not isinstance(made, Iterable) or isinstance(made, (np.ndarray, Mapping)):
            raise ConfigError(
                "dataset", type(dataset).__name__, "gives no batches.",
                "Give a tf.data.Dataset, or a list or generator of (inputs, labels) batches.",
            )  # fmt: skip
        yield made
        if iter(made) is made and made is dataset:
            return


def split(batch: Any, *, labelled: bool) -> tuple[Any, Any, np.ndarray | None]:
    """(inputs, labels, weights) of (inputs, labels) or (inputs, labels, weights), as arrays.

    Args:
      labelled: whether there must be labels; otherwise inputs alone do as well.

    Raises:
      ConfigError: it is something else, or its arrays are of different lengths.
    """
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if len(parts) > 3 or (labelled and len(parts) < 2):
        raise ConfigError(
            "dataset", f"a batch of {len(parts)} part{'s' * (len(parts) != 1)}",
            "a batch is (inputs, labels), or (inputs, labels, weights).",
            "For example: dataset.map(lambda row: (row['image'], row['label'])).batch(32)",
        )  # fmt: skip
    inputs, labels, weights = (jax.tree.map(_as_array, part) for part in (*parts, None, None)[:3])
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves((inputs, labels, weights))}
    if len(lengths) > 1 or () in lengths:
        shapes = [leaf.shape for leaf in jax.tree.leaves((inputs, labels, weights))]
        raise ConfigError(
            "dataset", f"shapes {', '.join(map(str, shapes))}",
            "the arrays of a batch have one first dimension, its examples.", "Use .batch(32).",
        )  # fmt: skip
    return inputs, labels, weights


def _as_array(value: Any) -> np.ndarray:
    """In the 32 bits that JAX computes with."""
    array = np.asarray(value)
    narrower = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}
    array = array.astype(narrower.get(array.dtype.name, array.dtype))
    if array.dtype == object or array.dtype.kind in "USM":
        raise ConfigError(
            "dataset", f"dtype {np.asarray(value).dtype}", "is not made of numbers.",
            "Turn text into ids first.",
        )  # fmt: skip
    return array


class OnMesh:
    """Puts batches on a mesh, divided along their examples.

    A batch is filled up to a multiple of the mesh's parts, and to the largest batch before it, so
    that one compiled program serves all of them. The rows added repeat the batch's own, so that
    statistics see nothing strange, and have weight 0: no loss or metric counts them.
    """

    def __init__(self, rules: Rules):
        self._mesh, axes = rules.mesh, rules.mesh_axes("batch")
        self.parts = math.prod(rules.mesh.shape[axis] for axis in axes)
        self._axes, self._rows = axes, 0

    def __call__(self, batch: tuple[Any, Any, np.ndarray | None]) -> dict[str, Any]:
        """The arrays `inputs`, `labels` and `weights` on the devices."""
        inputs, labels, weights = batch
        count = jax.tree.leaves(inputs)[0].shape[0]
        if count == 0:
            raise ConfigError("dataset", "a batch of 0 examples", "is empty.", "Leave it out.")
        self._rows = max(self._rows, -(-count // self.parts) * self.parts)
        weights = np.ones(count, np.float32) if weights is None else weights.astype(np.float32)
        if weights.shape != (count,):
            raise ConfigError(
                "dataset", f"weights {weights.shape}", "are one number for each example.",
                f"Use shape ({count},).",
            )  # fmt: skip
        taken = np.arange(self._rows) % count
        arrays = {"inputs": inputs, "weights": np.pad(weights, (0, self._rows - count))}
        if labels is not None:
            arrays["labels"] = labels
        filled = {
            name: part if name == "weights" else jax.tree.map(lambda x: x[taken], part)
            for name, part in arrays.items()
        }
        return jax.tree.map(self._put, filled)

    def _put(self, array: np.ndarray) -> jax.Array:
        spec = jax.sharding.PartitionSpec(self._axes or None)
        return jax.device_put(array, NamedSharding(self._mesh, spec))
