"""The last of what is done to images, on the devices that they are for: mixed and normalised.

So bytes travel, not numbers of four; each device works on its own rows, by a program of its own, so
that nothing waits for another device or process.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxtpu.config import Config
from jaxtpu.data.batch import image_batch_spec


class Finisher:
    """Puts batches of images on the devices.

    Args:
      rows: of the global batch, those that this process holds; sorted.
      sharding: of a batch; its first axis is that of the rows.
    """

    def __init__(self, config: Config, rows: np.ndarray, sharding: Sharding):
        size = config.data.batch_size
        soft = config.images.mixup > 0
        self._spec = image_batch_spec(size, config.model.vision, soft_labels=soft)
        self._sharding = sharding
        self._rows = {
            device: slice(*np.searchsorted(rows, slices[0].indices(size)[:2]))
            for device, slices in sharding.addressable_devices_indices_map((size,)).items()
        }
        classes = config.model.vision.classes if soft else 0
        images = config.images
        self._finish = _program(tuple(images.mean), tuple(images.deviation), classes)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """`batch` as the step takes it.

        Args:
          batch: rows of this process: `images` [rows, S, S, C], 0 to 255; `labels`, int32 [rows];
            `weights`, float32 [rows]. With mixup in training also `other_images`, `other_labels`,
            and `share`, float32 [rows], of the first of the two.
        """
        parts = [
            self._finish(jax.device_put({n: v[rows] for n, v in batch.items()}, device))
            for device, rows in self._rows.items()
        ]
        return {
            name: jax.make_array_from_single_device_arrays(
                leaf.shape, self._sharding, [part[name] for part in parts]
            )
            for name, leaf in self._spec.items()
        }


@functools.lru_cache
def _program(mean: tuple[float, ...], deviation: tuple[float, ...], classes: int):
    """Args: classes: of labels that are probabilities; 0 where they are numbers of classes."""

    def finish(batch: dict[str, Any]) -> dict[str, jax.Array]:
        pixels = batch["images"].astype(jnp.float32)
        labels = jax.nn.one_hot(batch["labels"], classes) if classes else batch["labels"]
        if "share" in batch:
            share, other = batch["share"], batch["other_images"].astype(jnp.float32)
            weight = share[:, None, None, None]
            pixels = weight * pixels + (1 - weight) * other
            other_labels = jax.nn.one_hot(batch["other_labels"], classes)
            labels = share[:, None] * labels + (1 - share[:, None]) * other_labels
        scale = 255 * jnp.array(deviation, jnp.float32)
        pixels = (pixels - 255 * jnp.array(mean, jnp.float32)) / scale
        return {"images": pixels, "labels": labels, "weights": batch["weights"]}

    return jax.jit(finish)
