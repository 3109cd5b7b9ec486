"""Parameters as a folder of Hugging Face: an array of a layer at a time, gathered and written."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.config import ModelConfig
from jaxtpu.interop.families import family_of_model
from jaxtpu.interop.folder import INDEX, WEIGHTS
from jaxtpu.interop.read import true_shape
from jaxtpu.interop.safetensors_file import Entry, write_file
from jaxtpu.interop.tensors import Tensor, tensors
from jaxtpu.models import Model
from jaxtpu.paths import flatten

_FILE_BYTES = 5 * 10**9


def write_folder(
    to: pathlib.Path, config: ModelConfig, model: Model, params: Any, dtype: str,
    file_bytes: int = _FILE_BYTES,
) -> list[pathlib.Path]:  # fmt: skip
    """Writes config.json and the weights; returns the files.

    Args:
      dtype: number format of the weights.
      file_bytes: the most that a file holds, unless one array is larger.

    Raises:
      ConfigError: no architecture of Hugging Face is this model.
    """
    family = family_of_model(config)
    arrays = _Arrays(config, model, params, np.dtype(dtype), family.model_type)
    groups = _in_files(arrays.entries(), file_bytes)
    names = [WEIGHTS] if len(groups) == 1 else [
        f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))
    ]  # fmt: skip
    first = jax.process_index() == 0
    if first:
        to.mkdir(parents=True, exist_ok=True)
        _write_json(to / "config.json", family.hf_config(config) | {"torch_dtype": dtype})
    for name, entries in zip(names, groups, strict=True):
        made = arrays.values(entries)
        if first:
            write_file(to / name, entries, made)
        else:  # all processes take part in gathering
            for _ in made:
                pass
    if first and len(groups) > 1:
        weight_map = {e.name: n for n, entries in zip(names, groups, strict=True) for e in entries}
        total = sum(entry.bytes for entries in groups for entry in entries)
        _write_json(to / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [to / name for name in names]


def parameter_arrays(
    config: ModelConfig, model: Model, tree: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of all that Hugging Face has of a tree like the parameters, such as gradients."""
    family = family_of_model(config)
    arrays = _Arrays(config, model, tree, np.dtype("float32"), family.model_type)
    entries = arrays.entries()
    for entry, made in zip(entries, arrays.values(entries), strict=True):
        yield entry.name, made


def _write_json(path: pathlib.Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _in_files(entries: list[Entry], most: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.bytes for e in groups[-1]) + entry.bytes > most:
            groups.append([])
        groups[-1].append(entry)
    return groups


class _Arrays:
    """Our parameters as their arrays, made one by one."""

    def __init__(self, config: ModelConfig, model: Model, params: Any, dtype, model_type: str):
        self.config, self.axes, self.params, self.dtype = config, model.axes, flatten(params), dtype
        by_name: dict[str, list[Tensor]] = {}
        for tensor in tensors(config, model_type):
            by_name.setdefault(tensor.theirs, []).append(tensor)
        self.sources: dict[str, tuple[list[Tensor], tuple[int, ...]]] = {}
        for layer in [None, *range(config.layers)]:
            for theirs, parts in by_name.items():
                if ("{layer}" in theirs) == (layer is not None):
                    experts = range(config.moe.num_experts) if "{expert}" in theirs else [None]
                    for expert in experts:
                        at = tuple(n for n in (layer, expert) if n is not None)
                        name = theirs.format(layer=layer, expert=expert)
                        self.sources[name] = parts, at

    def entries(self) -> list[Entry]:
        found = []
        for name, (parts, at) in self.sources.items():
            shape = parts[0].shape(self._true_shape(parts[0].ours)[len(at) :])
            found.append(Entry(name, shape, self.dtype))
        return found

    def _true_shape(self, path: str) -> tuple[int, ...]:
        return true_shape(self.config, path, self.axes[path], self.params[path].shape)

    def values(self, entries: list[Entry]) -> Iterator[np.ndarray]:
        for entry in entries:
            parts, at = self.sources[entry.name]
            made = [tensor.array(self._ours(tensor.ours, at)) for tensor in parts]
            yield (made[0] if len(made) == 1 else np.concatenate(made, -1)).astype(entry.dtype)

    def _ours(self, path: str, at: tuple[int, ...]) -> np.ndarray:
        """What our parameter holds of a layer (and an expert), on the host, without padding."""
        param = self.params[path]
        whole = NamedSharding(param.sharding.mesh, P())
        taken = _take(len(at), whole)(param, np.asarray(at, np.int32))
        shape = self._true_shape(path)[len(at) :]
        return np.asarray(taken.addressable_data(0))[tuple(slice(0, n) for n in shape)]


_TAKERS: dict = {}


def _take(dims: int, sharding: NamedSharding):
    """(parameter, indices of its first dimensions) -> that part, on every device."""
    key = dims, sharding
    if key not in _TAKERS:

        def take(param, at):
            for i in range(dims):
                param = jax.lax.dynamic_index_in_dim(param, at[i], 0, keepdims=False)
            return param

        _TAKERS[key] = jax.jit(take, out_shardings=sharding)
    return _TAKERS[key]
