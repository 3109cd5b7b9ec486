"""The loader: batches of a token stream on the devices, in an order that can be entered anywhere."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtpu.data.batch import batch_spec
from jaxtpu.data.prefetch import Prefetcher
from jaxtpu.data.tokens import TokenStream
from jaxtpu.errors import ConfigError

Batch = dict[str, jax.Array]
HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the training data; all that a checkpoint needs to go on from there.

    Attributes:
      examples: examples consumed since the start of training, over all epochs and hosts.
      seed: of the order of examples.
    """

    examples: int
    seed: int

    def to_json(self) -> dict[str, int]:
        """As a dict that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, int]) -> "Position":
        """The position that `to_json` gave."""
        return cls(examples=int(values["examples"]), seed=int(values["seed"]))


@functools.lru_cache(maxsize=3)  # a batch can cross into the next epoch, and threads run ahead
def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the examples in an epoch: a permutation, [num_examples] int64, read-only.

    It depends on the arguments alone: not on hosts, devices, batch size, or what came before.
    """
    # Numpy keeps the raw bits of a generator the same in all versions, but not its permutations.
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_examples)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


class TrainLoader:
    """An endless iterator of (batch, position after it), with batches made ahead in a thread.

    The examples are those of the epochs, one shuffled epoch after the other. Batch i takes the
    next `batch_size` of them after `start`, so a batch can cross from one epoch into the next,
    and to resume is to start at another position; no state is kept elsewhere.

    A batch has the arrays of `batch_spec`, of the global shape, sharded by `sharding`. A process
    reads only the rows that its own devices hold.

    Use it as a context manager, or call `close()`. Not safe for use by several threads.

    Args:
      stream: what to read.
      batch_size: examples in a batch, over all processes.
      sequence_length: tokens in an example.
      seed: of the order of examples.
      start: where to start; `Position(0, seed)` for a new run.
      sharding: of each [batch_size, sequence_length] array.
      prefetch: batches that are kept ready on the devices, at least 1.

    Raises:
      ConfigError: the stream is shorter than one example; `start` is of another seed.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        start: Position,
        sharding: NamedSharding,
        prefetch: int = 2,
    ):
        num_examples = stream.examples(sequence_length)
        if num_examples == 0:
            raise ConfigError(
                "data.sequence_length",
                sequence_length,
                f"the training split has {stream.num_tokens} tokens, less than one example.",
                f"Use at most {stream.num_tokens - 1}.",
            )
        if start.seed != seed:
            raise ConfigError(
                "seed",
                seed,
                "the run to go on with has its examples in the order of another seed.",
                f"Use {start.seed}.",
            )
        self._position, self._batch_size = start, batch_size
        rows, columns = local_indices(sharding, (batch_size, sequence_length))

        def host_batch(number: int) -> HostBatch:
            examples = start.examples + number * batch_size + rows
            epochs, offsets = np.divmod(examples, num_examples)
            indices = np.empty_like(examples)
            for epoch in np.unique(epochs):
                order = epoch_order(num_examples, seed, int(epoch))
                indices[epochs == epoch] = order[offsets[epochs == epoch]]
            return _take(stream, indices, sequence_length, columns)

        # Neither function may hold `self`: their thread would keep it from being collected.
        spec = batch_spec(batch_size, sequence_length)
        to_device = functools.partial(_to_device, spec=spec, sharding=sharding)
        dtypes = {name: array.dtype for name, array in spec.items()}
        self._prefetcher = Prefetcher(host_batch, dtypes, to_device, prefetch)

    def __iter__(self) -> Iterator[tuple[Batch, Position]]:
        return self

    def __next__(self) -> tuple[Batch, Position]:
        """The next batch, and the position from which a run would go on after it.

        Raises:
          RuntimeError: reading failed, with the failure as its cause; or the loader is closed.
        """
        batch = next(self._prefetcher)
        examples = self._position.examples + self._batch_size
        self._position = dataclasses.replace(self._position, examples=examples)
        return batch, self._position

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited for batches so far."""
        return self._prefetcher.wait_seconds

    def close(self) -> None:
        """Stops the thread and frees the batches made ahead. A second call does nothing."""
        self._prefetcher.close()

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def evaluation_batches(
    stream: TokenStream,
    *,
    batch_size: int,
    sequence_length: int,
    sharding: NamedSharding,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Batches that hold every target of the stream exactly once, in order.

    The last batch is filled up with rows of padding, whose weights are 0. Every process yields
    the same number of batches.

    Args:
      max_batches: stop after so many; None for the whole stream.
    """
    spec = batch_spec(batch_size, sequence_length)
    rows, columns = local_indices(sharding, (batch_size, sequence_length))
    num_examples = stream.examples(sequence_length, partial=True)
    num_batches = math.ceil(num_examples / batch_size)
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    for number in range(num_batches):
        examples = number * batch_size + rows
        indices = np.where(examples < num_examples, examples, -1)
        yield _to_device(_take(stream, indices, sequence_length, columns), spec, sharding)


def local_indices(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """For each dimension of a global array, the sorted indices that this process's devices hold."""
    shards = sharding.addressable_devices_indices_map(shape).values()
    return tuple(
        np.unique(np.concatenate([np.arange(size)[shard[axis]] for shard in shards]))
        for axis, size in enumerate(shape)
    )


def _take(
    stream: TokenStream, indices: np.ndarray, sequence_length: int, columns: np.ndarray
) -> HostBatch:
    """Whole rows first, then the columns: segments and positions are counted along the row."""
    batch = stream.example_batch(indices, sequence_length)
    if len(columns) < sequence_length:
        batch = {name: values[:, columns] for name, values in batch.items()}
    return batch


def _to_device(
    batch: HostBatch, spec: dict[str, jax.ShapeDtypeStruct], sharding: NamedSharding
) -> Batch:
    return {
        name: jax.make_array_from_process_local_data(sharding, batch[name], spec[name].shape)
        for name in spec
    }
