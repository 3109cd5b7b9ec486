"""The loader: batches of a token stream on the devices, in an order that can be entered anywhere."""

import functools
import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtpu.data.batch import batch_spec
from jaxtpu.data.mixture import Mixture, Schedule, Stream
from jaxtpu.data.order import Position, as_mixture, dealt, epoch_order, indices_of, taken_before
from jaxtpu.data.prefetch import Batches, Prefetcher, host_batches
from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.errors import ConfigError

Batch = dict[str, jax.Array]
HostBatch = dict[str, np.ndarray]


class TrainLoader(Batches):
    """Batches of tokens, with the position after each.

    The examples are those of the epochs, one shuffled epoch after the other. Batch i takes the
    next `batch_size` of them after `start`, so a batch can cross from one epoch into the next,
    and to resume is to start at another position; no state is kept elsewhere. Of a mixture, each
    stream has epochs of its own, and a batch the next examples of each by its share, mixed.

    A batch has the arrays of `batch_spec`, of the global shape, sharded by `sharding`. A process
    reads only the rows that its own devices hold.

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
        mixture = as_mixture(stream)
        for one in mixture.streams:
            _check_length(one, sequence_length)
        if start.seed != seed:
            raise ConfigError(
                "seed",
                seed,
                "the run to go on with has its examples in the order of another seed.",
                f"Use {start.seed}.",
            )
        before = taken_before(start, mixture)
        schedule = Schedule(mixture, before, batch_size)
        rows, columns = local_indices(sharding, (batch_size, sequence_length))
        # A batch can cross into the next epoch, and threads run ahead.
        order_of = functools.lru_cache(3 * len(mixture.streams))(epoch_order)

        def host_batch(number: int) -> HostBatch:
            first, after = schedule.before(number), schedule.before(number + 1)
            stream_of, numbers = dealt(first, after, seed)
            stream_of, numbers = stream_of[rows], numbers[rows]
            parts = {}
            for which in np.unique(stream_of):
                mine = np.flatnonzero(stream_of == which)
                one = mixture.streams[which]
                indices = indices_of(numbers[mine], one.examples(sequence_length), seed, order_of)
                parts[which] = mine, _take(one, indices, sequence_length, columns)
            return _merged(parts, len(rows))

        # Neither function may hold `self`: their thread would keep it from being collected.
        spec = batch_spec(batch_size, sequence_length)
        to_device = functools.partial(_to_device, spec=spec, sharding=sharding)
        dtypes = {name: array.dtype for name, array in spec.items()}
        import_tensorflow()
        batches = functools.partial(host_batches, host_batch, dtypes)

        def position_after(count: int) -> Position:
            schedule.forget(count)
            taken = schedule.before(count)
            examples = start.examples + count * batch_size
            return Position(examples, seed, taken if len(taken) > 1 else ())

        super().__init__(Prefetcher(batches, to_device, prefetch), position_after)


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


def _check_length(stream: Stream, sequence_length: int) -> None:
    if stream.examples(sequence_length) == 0:
        raise ConfigError(
            "data.sequence_length",
            sequence_length,
            f"the training split has {stream.num_tokens} tokens, less than one example.",
            f"Use at most {stream.num_tokens - 1}.",
        )


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
