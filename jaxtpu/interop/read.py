"""Weights from safetensors files straight onto the mesh, one device's part of one parameter at a
time: that part is all that the host holds besides the mapped files."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxtpu.config import Config, ModelConfig
from jaxtpu.errors import ConfigError
from jaxtpu.interop.folder import HuggingFaceFolder
from jaxtpu.interop.safetensors_file import SafetensorsFile
from jaxtpu.interop.tensors import Tensor, base_prefix, tensors
from jaxtpu.models import Model
from jaxtpu.paths import flatten, map_with_path
from jaxtpu.train.programs import Programs
from jaxtpu.train.step import TrainState


def true_shape(
    model_config: ModelConfig, path: str, axes: tuple[str | None, ...], shape
) -> tuple[int, ...]:
    """The shape of a parameter without what only fills it up."""
    most = {"vocab": model_config.vocab_size}
    if "/shared/" not in path:
        most["mlp"] = model_config.mlp
    sizes = zip(shape, axes, strict=True)
    return tuple(min(size, most.get(axis, size)) for size, axis in sizes)


class Weights:
    """The arrays of a folder, by name, whichever file they are in."""

    def __init__(self, folder: HuggingFaceFolder):
        self._files: list[SafetensorsFile] = folder.files()
        self._where = {name: file for file in self._files for name in file.names()}
        self._folder, self._prefix = folder, base_prefix(folder.family.model_type)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        for known in (name, name.removeprefix(self._prefix), self._prefix + name):
            if known in self._where:
                self.used.add(known)
                return self._where[known][known]
        raise ConfigError(
            self._folder.field, str(self._folder.path), f"has no array {name}.",
            "Its config.json names more than the files hold: download it again.",
        )  # fmt: skip

    def forget(self) -> None:
        for file in self._files:
            file.forget()


def read_params(
    folder: HuggingFaceFolder, config: ModelConfig, model: Model, shardings: Any
) -> Any:
    """The parameters of `model`, divided as `shardings` say, from the files of `folder`.

    Args:
      shardings: tree of the parameters' shardings.

    Raises:
      ConfigError: an array is missing, or has another shape.
    """
    weights = Weights(folder)
    by_path = {t.ours: t for t in tensors(config, folder.family.model_type)}
    placed = flatten(shardings)

    def one(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        source = _Source(weights, by_path[path], config, model.axes[path], leaf)
        made = _divided(leaf.shape, placed[path], source.part)
        weights.forget()
        return made

    return map_with_path(one, model.abstract_params)


def _divided(shape: tuple[int, ...], sharding: Any, part: Callable) -> jax.Array:
    """An array of which `part(index)` gives each device's part. One after the other: JAX's own
    `make_array_from_callback` holds the parts of all devices at once."""
    devices: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(
            tuple(i.indices(n) for i, n in zip(index, shape, strict=True)), []
        ).append(device)
    arrays = []
    for bounds, same in devices.items():
        made = part(tuple(slice(*b) for b in bounds))
        arrays += jax.block_until_ready([jax.device_put(made, device) for device in same])
        del made
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


class _Source:
    """One of our parameters as arrays of files."""

    def __init__(self, weights: Weights, tensor: Tensor, config, axes, leaf):
        self.weights, self.tensor, self.leaf = weights, tensor, leaf
        shape = true_shape(config, tensor.ours, axes, leaf.shape)
        # Dimensions of which theirs has one array each.
        self.names = [n for n in ("layer", "expert") if f"{{{n}}}" in tensor.theirs]
        self.stacked = len(self.names)
        self.shape = shape[self.stacked :]

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """The elements at `index` of the parameter, in its dtype; padding is 0."""
        ranges = [range(i.start, i.stop) for i in index]
        out = np.zeros([len(r) for r in ranges], self.leaf.dtype)
        stacks, inner = ranges[: self.stacked], ranges[self.stacked :]
        held = tuple(slice(r.start, min(r.stop, n)) for r, n in zip(inner, self.shape, strict=True))
        filled = tuple(slice(0, max(0, s.stop - s.start)) for s in held)
        for at in np.ndindex(*(len(r) for r in stacks)):
            numbers = [r[i] for r, i in zip(stacks, at, strict=True)]
            self._copy(out[at], self._view(numbers), held, filled)
        return out

    def _view(self, numbers: list[int]) -> np.ndarray:
        name = self.tensor.theirs.format(**dict(zip(self.names, numbers, strict=True)))
        try:
            return self.tensor.view(self.weights[name], self.shape)
        except ValueError as error:
            folder = self.weights._folder
            raise ConfigError(
                folder.field, str(folder.path), f"{name} {error}.", "Download it again."
            ) from None

    @staticmethod
    def _copy(out: np.ndarray, view: np.ndarray, held, filled) -> None:
        if all(s.stop > s.start for s in held):
            out[filled] = view[held]


def initial_state(config: Config, programs: Programs, field: str = "weights") -> TrainState:
    """The state before the first step: from `config.weights`, or from the seed without those.

    Args:
      field: whose value the folder is, for errors.
    """
    if not config.weights:
        return programs.init()
    folder = HuggingFaceFolder(config.weights, field)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract_state.params)
    return programs.init_from(read_params(folder, config.model, programs.model, shardings))
