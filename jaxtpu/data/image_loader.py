"""The loader of images: batches on the devices, in an order that can be entered anywhere."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtpu.config import Config
from jaxtpu.data.batch import image_batch_spec
from jaxtpu.data.images import ImageSet, augmented
from jaxtpu.data.loader import Position, epoch_order, local_indices
from jaxtpu.data.prefetch import Prefetcher
from jaxtpu.errors import ConfigError

Batch = dict[str, jax.Array]


class ImageLoader:
    """An endless iterator of (batch, position after it), as `TrainLoader` is one of tokens.

    Batch i takes the next `data.batch_size` images of the shuffled epochs after `start`, altered as
    `config.images` says by draws that depend on the seed and the place of the batch alone.

    Raises:
      ConfigError: `start` is of another seed.
    """

    def __init__(self, images: ImageSet, config: Config, start: Position, sharding: NamedSharding):
        if start.seed != config.seed:
            raise ConfigError(
                "seed", config.seed,
                "the run to go on with has its examples in the order of another seed.",
                f"Use {start.seed}.",
            )  # fmt: skip
        self._position, self._size = start, config.data.batch_size
        spec = _spec(config)
        (rows,) = local_indices(sharding, (self._size,))
        host_batch = functools.partial(_train_batch, images, config, start.examples, rows)
        self._prefetcher = Prefetcher(
            host_batch,
            {name: array.dtype for name, array in spec.items()},
            functools.partial(to_device, shapes=spec, sharding=sharding),
            config.data.prefetch,
        )

    def __iter__(self) -> Iterator[tuple[Batch, Position]]:
        return self

    def __next__(self) -> tuple[Batch, Position]:
        """The next batch, and the position from which a run would go on after it."""
        batch = next(self._prefetcher)
        examples = self._position.examples + self._size
        self._position = dataclasses.replace(self._position, examples=examples)
        return batch, self._position

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited for batches so far."""
        return self._prefetcher.wait_seconds

    def close(self) -> None:
        """Stops the thread. A second call does nothing."""
        self._prefetcher.close()

    def __enter__(self) -> "ImageLoader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _spec(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    vision = config.model.vision
    return image_batch_spec(config.data.batch_size, vision, soft_labels=config.images.mixup > 0)


def _train_batch(images: ImageSet, config: Config, first: int, rows: np.ndarray, number: int):
    """The rows `rows` of global batch `number` after `first` examples."""
    size, seed = config.data.batch_size, config.seed
    first += number * size
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, first, 2])))

    def altered(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs, offsets = np.divmod(first + rows, len(images))
        indices = np.array(
            [
                epoch_order(len(images), seed, int(e))[o]
                for e, o in zip(epochs, offsets, strict=True)
            ]
        )
        made = augmented(images.read(indices), config.images, random, (rows, size))
        return made, images.labels[indices]

    pixels, labels = altered(rows)
    if config.images.mixup:
        shares = random.beta(config.images.mixup, config.images.mixup, size)[rows]
        partners, partner_labels = altered(random.permutation(size)[rows])
        shares = shares.astype(np.float32)
        share4 = shares[:, None, None, None]
        pixels = share4 * pixels + (1 - share4) * partners
        of = np.eye(config.model.vision.classes, dtype=np.float32)
        labels = shares[:, None] * of[labels] + (1 - shares[:, None]) * of[partner_labels]
    weights = np.ones(len(rows), np.float32)
    return {"images": pixels.astype(np.float32), "labels": labels, "weights": weights}


def image_evaluation_batches(
    images: ImageSet, config: Config, sharding: NamedSharding, max_batches: int | None = None
) -> Iterator[Batch]:
    """Batches that hold every image once, in order, unaltered; the last is filled up with rows of
    weight 0. Every process yields the same number of batches."""
    size, spec = config.data.batch_size, _spec(config)
    (rows,) = local_indices(sharding, (size,))
    count = math.ceil(len(images) / size)
    for number in range(count if max_batches is None else min(count, max_batches)):
        examples = number * size + rows
        indices = np.minimum(examples, len(images) - 1)
        labels = images.labels[indices]
        if config.images.mixup:
            labels = np.eye(config.model.vision.classes, dtype=np.float32)[labels]
        batch = {
            "images": images.read(indices),
            "labels": labels,
            "weights": (examples < len(images)).astype(np.float32),
        }
        yield to_device(batch, spec, sharding)


def to_device(batch, shapes: dict[str, jax.ShapeDtypeStruct], sharding: NamedSharding) -> Batch:
    """This process's rows of each array, as a part of the global array of that shape."""
    return {
        name: jax.make_array_from_process_local_data(sharding, batch[name], leaf.shape)
        for name, leaf in shapes.items()
    }
