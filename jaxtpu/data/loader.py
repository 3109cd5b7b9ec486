"""The loader: batches of a token stream on the devices, in an order that can be entered anywhere."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtpu.data.batch import batch_spec
from jaxtpu.data.mixture import Mixture, Schedule, Share, Stream
from jaxtpu.data.prefetch import Prefetcher, host_batches
from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.errors import ConfigError

Batch = dict[str, jax.Array]
HostBatch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the training data; all that a checkpoint needs to go on from there.

    Attributes:
      examples: examples consumed since the start of training, over all epochs and hosts.
      seed: of the order of examples.
      taken: of those, how many were of each source of a mixture; empty for a single source.
    """

    examples: int
    seed: int
    taken: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a dict that JSON can hold."""
        return dataclasses.asdict(self) | {"taken": list(self.taken)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Position":
        """The position that `to_json` gave."""
        taken = tuple(int(n) for n in values.get("taken", ()))
        return cls(examples=int(values["examples"]), seed=int(values["seed"]), taken=taken)


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
    and to resume is to start at another position; no state is kept elsewhere. Of a mixture, each
    stream has epochs of its own, and a batch the next examples of each by its share, mixed.

    A batch has the arrays of `batch_spec`, of the global shape, sharded by `sharding`. A process
    reads only the rows that its own devices hold.

    Use it as a context manager, or call `close()`. Not safe for use by several threads.

    Args:
      stream: what to read, one stream or a mixture.
      batch_size: examples in a batch, over all processes.
      sequence_length: tokens in an example.
      seed: of the order of examples.
      start: where to start; `Position(0, seed)` for a new run.
      sharding: of each [batch_size, sequence_length] array.
      prefetch: batches that are kept ready on the devices, at least 1.

    Raises:
      ConfigError: a stream is shorter than one example; `start` is of another seed, or of other
        sources.
    """

    def __init__(
        self,
        stream: Stream | Mixture,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        start: Position,
        sharding: NamedSharding,
        prefetch: int = 2,
    ):
        mixture = stream if isinstance(stream, Mixture) else _alone(stream)
        for one in mixture.streams:
            _check_length(one, sequence_length)
        if start.seed != seed:
            raise ConfigError(
                "seed",
                seed,
                "the run to go on with has its examples in the order of another seed.",
                f"Use {start.seed}.",
            )
        self._position, self._batch_size, self._batches = start, batch_size, 0
        before = _taken(start, mixture)
        self._schedule = schedule = Schedule(mixture, before, batch_size)
        rows, columns = local_indices(sharding, (batch_size, sequence_length))
        # A batch can cross into the next epoch, and threads run ahead.
        order_of = functools.lru_cache(3 * len(mixture.streams))(epoch_order)

        def host_batch(number: int) -> HostBatch:
            first, after = schedule.before(number), schedule.before(number + 1)
            stream_of, numbers = _dealt(first, after, seed)
            stream_of, numbers = stream_of[rows], numbers[rows]
            parts = {}
            for which in np.unique(stream_of):
                mine = np.flatnonzero(stream_of == which)
                one = mixture.streams[which]
                indices = _indices(numbers[mine], one.examples(sequence_length), seed, order_of)
                parts[which] = mine, _take(one, indices, sequence_length, columns)
            return _merged(parts, len(rows))

        # Neither function may hold `self`: their thread would keep it from being collected.
        spec = batch_spec(batch_size, sequence_length)
        to_device = functools.partial(_to_device, spec=spec, sharding=sharding)
        dtypes = {name: array.dtype for name, array in spec.items()}
        import_tensorflow()
        batches = functools.partial(host_batches, host_batch, dtypes)
        self._prefetcher = Prefetcher(batches, to_device, prefetch)

    def __iter__(self) -> Iterator[tuple[Batch, Position]]:
        return self

    def __next__(self) -> tuple[Batch, Position]:
        """The next batch, and the position from which a run would go on after it.

        Raises:
          RuntimeError: reading failed, with the failure as its cause; or the loader is closed.
        """
        batch = next(self._prefetcher)
        self._batches += 1
        self._schedule.forget(self._batches)
        taken = self._schedule.before(self._batches)
        examples = self._position.examples + self._batch_size
        self._position = dataclasses.replace(
            self._position, examples=examples, taken=taken if len(taken) > 1 else ()
        )
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
    stream: Stream | Mixture,
    *,
    batch_size: int,
    sequence_length: int,
    sharding: NamedSharding,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Batches that hold every target of the stream exactly once, in order; of a mixture, of one
    stream after the other.

    The last batch is filled up with rows of padding, whose weights are 0. Every process yields
    the same number of batches.

    Args:
      max_batches: stop after so many; None for the whole stream.
    """
    streams = stream.streams if isinstance(stream, Mixture) else (stream,)
    spec = batch_spec(batch_size, sequence_length)
    rows, columns = local_indices(sharding, (batch_size, sequence_length))
    counts = [one.examples(sequence_length, partial=True) for one in streams]
    batches = (
        (one, count, number)
        for one, count in zip(streams, counts, strict=True)
        for number in range(math.ceil(count / batch_size))
    )
    for one, num_examples, number in itertools.islice(batches, max_batches):
        examples = number * batch_size + rows
        indices = np.where(examples < num_examples, examples, -1)
        yield _to_device(_take(one, indices, sequence_length, columns), spec, sharding)


def local_indices(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """For each dimension of a global array, the sorted indices that this process's devices hold."""
    shards = sharding.addressable_devices_indices_map(shape).values()
    return tuple(
        np.unique(np.concatenate([np.arange(size)[shard[axis]] for shard in shards]))
        for axis, size in enumerate(shape)
    )


def _alone(stream: Stream) -> Mixture:
    return Mixture(("",), (stream,), (Share("", 1.0, 1.0),))


def _check_length(stream: Stream, sequence_length: int) -> None:
    if stream.examples(sequence_length) == 0:
        raise ConfigError(
            "data.sequence_length",
            sequence_length,
            f"the training split has {stream.num_tokens} tokens, less than one example.",
            f"Use at most {stream.num_tokens - 1}.",
        )


def _taken(start: Position, mixture: Mixture) -> tuple[int, ...]:
    """Of each stream, the examples before `start`."""
    if len(mixture.streams) == 1:
        return (start.examples,)
    if start.examples == 0:
        return (0,) * len(mixture.streams)
    if len(start.taken) != len(mixture.streams):
        raise ConfigError(
            "data.mixture",
            ", ".join(mixture.names),
            f"the run to go on with has {len(start.taken) or 1} sources.",
            "Choose another --workdir.",
        )
    return start.taken


def _dealt(
    before: tuple[int, ...], after: tuple[int, ...], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each row of a global batch, its stream, and the number of its example in that."""
    counts = np.subtract(after, before)
    stream_of = np.repeat(np.arange(len(counts)), counts)
    if len(counts) > 1:  # streams are spread over the rows, and so over the devices
        bits = np.random.Philox(np.random.SeedSequence([seed, sum(before), 1]))
        stream_of = stream_of[np.argsort(bits.random_raw(len(stream_of)), kind="stable")]
    numbers = np.empty(len(stream_of), np.int64)
    for which, first in enumerate(before):
        mine = np.flatnonzero(stream_of == which)
        numbers[mine] = first + np.arange(len(mine))
    return stream_of, numbers


def _indices(numbers: np.ndarray, num_examples: int, seed: int, order_of) -> np.ndarray:
    """Which examples of a stream have these numbers, counted from the start of training on."""
    epochs, offsets = np.divmod(numbers, num_examples)
    indices = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        order = order_of(num_examples, seed, int(epoch))
        indices[epochs == epoch] = order[offsets[epochs == epoch]]
    return indices


def _merged(parts: dict[int, tuple[np.ndarray, HostBatch]], rows: int) -> HostBatch:
    """One batch of the rows that each stream gives."""
    if len(parts) == 1:
        return next(iter(parts.values()))[1]
    first = next(iter(parts.values()))[1]
    batch = {name: np.empty((rows, *v.shape[1:]), v.dtype) for name, v in first.items()}
    for where, part in parts.values():
        for name, values in part.items():
            batch[name][where] = values
    return batch


def _take(
    stream: Stream, indices: np.ndarray, sequence_length: int, columns: np.ndarray
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
