"""The loader of images: batches on the devices, in an order that can be entered anywhere."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtpu.config import Config
from jaxtpu.data.augment import evaluation_image, training_image
from jaxtpu.data.image_finish import Finisher
from jaxtpu.data.images import ImageSet
from jaxtpu.data.loader import local_indices
from jaxtpu.data.order import Position, epoch_order, indices_of
from jaxtpu.data.prefetch import Batches, Prefetcher
from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.errors import ConfigError, UserError

Batch = dict[str, jax.Array]
HostBatch = dict[str, np.ndarray]
_ENDLESS = 2**62


class ImageLoader(Batches):
    """Batches of images, with the position after each, as `TrainLoader` gives them of tokens.

    Batch i takes the next `data.batch_size` images of the shuffled epochs after `start`, altered as
    the section `images` says. How an image is altered depends on the seed and its number since the
    start of training alone; a process decodes only the rows that its own devices hold.

    Args:
      images: what to read.
      start: where to start; `Position(0, config.seed)` for a new run.
      sharding: its first axis is that of the rows of a batch.

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
        size = config.data.batch_size
        (rows,) = local_indices(sharding, (size,))
        import_tensorflow()
        prefetcher = Prefetcher(
            functools.partial(training_batches, images, config, start.examples, rows),
            Finisher(config, rows, sharding),
            config.data.prefetch,
        )
        super().__init__(
            prefetcher, lambda count: Position(start.examples + count * size, start.seed)
        )


def training_batches(
    images: ImageSet, config: Config, first: int, rows: np.ndarray
) -> Iterator[HostBatch]:
    """The rows `rows` of the global batches after `first` examples, on the host, as `Finisher`
    takes them.

    mixup (arXiv:1710.09412) draws for the whole global batch.
    """
    size, seed = config.data.batch_size, config.seed
    needed = np.union1d(rows, _partners(size)[rows]) if config.images.mixup else rows
    order_of = functools.lru_cache(3)(epoch_order)

    def plan(batch: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = first + batch * size + needed
        return indices_of(numbers, len(images), seed, order_of), numbers

    vision = config.model.vision
    picture = lambda data, number: training_image(  # noqa: E731
        data, number, seed, config.images, vision.image_size, vision.channels
    )
    own, others = (np.searchsorted(needed, some) for some in (rows, _partners(size)[rows]))
    ones, alpha = np.ones(len(rows), np.float32), config.images.mixup
    made = _Pipeline(images, config, plan, picture, len(needed)).batches(_ENDLESS)
    for batch, (pixels, labels) in enumerate(made):
        if not alpha:
            yield {"images": pixels, "labels": labels, "weights": ones}
            continue
        key = [seed, first + batch * size, 2]
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
        yield {
            "images": pixels[own], "labels": labels[own], "weights": ones,
            "other_images": pixels[others], "other_labels": labels[others],
            "share": random.beta(alpha, alpha, size)[rows].astype(np.float32),
        }  # fmt: skip


def image_evaluation_batches(
    images: ImageSet, config: Config, sharding: NamedSharding, max_batches: int | None = None
) -> Iterator[Batch]:
    """Batches that hold every image exactly once, in order, unaltered; the last is filled up with
    rows of weight 0. Every process yields the same number of batches.

    Args:
      max_batches: stop after so many; None for the whole split.
    """
    size, vision = config.data.batch_size, config.model.vision
    (rows,) = local_indices(sharding, (size,))
    count = math.ceil(len(images) / size)
    count = count if max_batches is None else min(count, max_batches)

    def plan(batch: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = batch * size + rows
        return np.minimum(numbers, len(images) - 1), numbers

    picture = lambda data, number: evaluation_image(  # noqa: E731
        data, vision.image_size, vision.channels
    )
    made = _Pipeline(images, config, plan, picture, len(rows)).batches(count)
    finish = Finisher(config, rows, sharding)
    for number, (pixels, labels) in enumerate(made):
        real = number * size + rows < len(images)
        yield finish({"images": pixels, "labels": labels, "weights": real.astype(np.float32)})


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """`tf.data`, from the numbers of a batch to its arrays.

    Attributes:
      plan: batch -> (index of each of its images, number of each as an example), int64 [rows].
      picture: (bytes of a file, number) -> image.
      rows: of a batch.
    """

    images: ImageSet
    config: Config
    plan: Callable[[int], tuple[np.ndarray, np.ndarray]]
    picture: Callable[[Any, Any], Any]
    rows: int

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(images [rows, S, S, C], labels [rows]) of `count` batches, in order.

        Raises:
          UserError: an image cannot be read.
        """
        tf = import_tensorflow()
        failures: list[BaseException] = []

        def read(index: np.ndarray) -> bytes:
            try:
                return self.images.read(int(index))
            except BaseException as error:
                failures.append(error)
                raise

        all_labels = tf.constant(self.images.labels)

        @tf.autograph.experimental.do_not_convert
        def example(index, number):
            data = tf.ensure_shape(tf.numpy_function(read, [index], tf.string), [])
            return self.picture(data, number), tf.gather(all_labels, index)

        @tf.autograph.experimental.do_not_convert
        def planned(batch):
            both = tf.numpy_function(lambda b: self.plan(int(b)), [batch], [tf.int64, tf.int64])
            return tuple(tf.ensure_shape(values, [self.rows]) for values in both)

        numbers = tf.data.Dataset.range(count)
        # Each example by itself, so that they are spread over cores; in order all the same.
        made = numbers.map(planned).unbatch().map(example, num_parallel_calls=tf.data.AUTOTUNE)
        made = made.batch(self.rows, drop_remainder=True)
        options = tf.data.Options()
        options.autotune.ram_budget = int(self.config.data.cache_gib * 2**30)
        options.deterministic = True
        ready = iter(made.prefetch(tf.data.AUTOTUNE).with_options(options).as_numpy_iterator())
        while True:
            try:
                arrays = next(ready)
            except StopIteration:
                return
            except tf.errors.OpError as error:
                # TensorFlow makes an error of its own out of one of `read`, without the cause.
                if failures:
                    raise failures[0] from None
                reason = (error.message or str(error)).splitlines()[0][:300]
                raise UserError(f"an image of {self.config.data.source} cannot be read any more, "
                                f"though it could before: {reason}") from error  # fmt: skip
            yield arrays


def _partners(size: int) -> np.ndarray:
    """For each row of a global batch, the one it is mixed with: its neighbour, which is a random
    one of the epoch, and most often of the same process. The last of an odd number stays alone."""
    return np.minimum(np.arange(size) ^ 1, size - 1)
