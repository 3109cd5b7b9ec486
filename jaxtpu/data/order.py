"""The order of the training examples: which of them a batch has, whatever hosts and meshes read it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtpu.data.mixture import Mixture, Share, Stream
from jaxtpu.errors import ConfigError


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


def as_mixture(stream: Stream | Mixture) -> Mixture:
    """`stream`, or the mixture of it alone."""
    if isinstance(stream, Mixture):
        return stream
    return Mixture(("",), (stream,), (Share("", 1.0, 1.0),))


def taken_before(start: Position, mixture: Mixture) -> tuple[int, ...]:
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


def dealt(
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


def indices_of(numbers: np.ndarray, num_examples: int, seed: int, order_of) -> np.ndarray:
    """Which examples of a stream have these numbers, counted from the start of training on."""
    epochs, offsets = np.divmod(numbers, num_examples)
    indices = np.empty_like(numbers)
    for epoch in np.unique(epochs):
        order = order_of(num_examples, seed, int(epoch))
        indices[epochs == epoch] = order[offsets[epochs == epoch]]
    return indices


def example_ids(
    names: Sequence[str], counts: Sequence[int], taken: Sequence[tuple[int, ...]], seed: int
) -> list[tuple[str, int]]:
    """(source, index of the example in it) of each row of a global batch.

    Args:
      names: of the sources.
      counts: of the examples of each.
      taken: of each source, the examples before the batch, and after it.
    """
    sources, numbers = dealt(*taken, seed)
    order_of = functools.lru_cache(2 * len(names))(epoch_order)
    return [
        (names[source], int(indices_of(np.array([number]), counts[source], seed, order_of)[0]))
        for source, number in zip(sources, numbers, strict=True)
    ]
