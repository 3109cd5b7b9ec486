"""Mixtures: examples of several streams, in shares that may move over the run."""

import dataclasses
import re
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxtpu.data.records import Counts
from jaxtpu.errors import ConfigError

_ENTRY = re.compile(r"\s*([^\s>]+?)(?:\s*->\s*(\S+))?\s+(\S.*)")


class Stream(Protocol):
    """What is read: a `TokenStream`, or a `PackedStream`."""

    def examples(self, sequence_length: int, *, partial: bool = False) -> int: ...

    def example_batch(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Share:
    """An entry of `data.mixture`.

    Attributes:
      source: as `data.source`.
      first, last: weights at the start and the end of the run.
    """

    source: str
    first: float
    last: float


def parse_mixture(entries: Sequence[str]) -> tuple[Share, ...]:
    """The entries of `data.mixture`, with weights that sum to 1 at the start and at the end.

    Raises:
      ConfigError: an entry is not of the form 'WEIGHT SOURCE', or the weights make no shares.
    """
    shares = []
    for entry in entries:
        found = _ENTRY.fullmatch(entry)
        first = _weight(found[1]) if found else None
        last = (_weight(found[2]) if found[2] else first) if found else None
        if first is None or last is None:
            raise ConfigError(
                "data.mixture", entry, "is not of the form 'WEIGHT SOURCE'.",
                "For example: '0.7 python_corpus', or '0.7->0.2 files:notes/*.txt'.",
            )  # fmt: skip
        shares.append(Share(found[3].strip(), first, last))
    names = [share.source for share in shares]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            "data.mixture", repeated[0], "is there more than once.", "Add up its weights."
        )
    totals = sum(share.first for share in shares), sum(share.last for share in shares)
    if shares and not min(totals) > 0:
        raise ConfigError("data.mixture", entries, "has no weight above 0 at one of its ends.")
    return tuple(
        Share(share.source, share.first / totals[0], share.last / totals[1]) for share in shares
    )


def _weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if 0 <= weight < float("inf") else None


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several streams, as one thing to train on. One stream alone is a mixture of one.

    Attributes:
      names: of the sources.
      streams: one for each.
      shares: their weights, which sum to 1.
      length: examples over which the weights move.
    """

    names: tuple[str, ...]
    streams: tuple[Any, ...]
    shares: tuple[Share, ...]
    length: int = 1

    def examples(self, sequence_length: int, *, partial: bool = False) -> int:
        """Of all streams together."""
        return sum(s.examples(sequence_length, partial=partial) for s in self.streams)

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def num_documents(self) -> int:
        return sum(stream.num_documents for stream in self.streams)

    @property
    def num_bytes(self) -> int:
        """0 where that of one stream is not known."""
        sizes = [stream.num_bytes for stream in self.streams]
        return sum(sizes) if all(sizes) else 0

    @property
    def tokenizer(self) -> str:
        return self.streams[0].tokenizer

    @property
    def counts(self) -> Counts:
        parts = [stream.counts for stream in self.streams]
        first = next((part.first_bad for part in parts if part.first_bad), "")
        sums = (sum(getattr(p, name) for p in parts) for name in ("read", "used", "empty", "bad"))
        return Counts(*sums, first)

    def due(self, examples: int) -> np.ndarray:
        """How many of the first `examples` should be of each stream, [streams] float64: the
        integral of its weight."""
        first = np.array([share.first for share in self.shares])
        last = np.array([share.last for share in self.shares])
        moving = min(examples, self.length)
        slope = (last - first) / (2 * self.length)
        return first * moving + slope * moving**2 + last * (examples - moving)

    def take(self, before: Sequence[int], examples: int) -> np.ndarray:
        """How many of the next `examples` are of each stream, [streams] int64.

        Those which are the farthest behind what is due come first, so that no stream is ever an
        example or two from its share, and what was taken `before` is all that there is to know.
        """
        done = np.asarray(before, np.int64)
        behind = self.due(int(done.sum()) + examples) - done
        taken = np.maximum(np.floor(behind), 0).astype(np.int64)
        while (missing := examples - int(taken.sum())) != 0:
            step = 1 if missing > 0 else -1
            open_ = taken > 0 if step < 0 else np.ones(len(taken), bool)
            rest = np.where(open_, step * (behind - taken), -np.inf)
            most = np.argsort(-rest, kind="stable")[: min(abs(missing), int(open_.sum()))]
            taken[most] += step
        return taken


class Schedule:
    """What each batch takes of each stream, from a place in the run on. Safe for several threads."""

    def __init__(self, mixture: Mixture, before: Sequence[int], batch_size: int):
        self._mixture, self._batch_size = mixture, batch_size
        self._lock = threading.Lock()
        self._oldest = 0
        self._before = [tuple(int(n) for n in before)]

    def before(self, batch: int) -> tuple[int, ...]:
        """Examples taken of each stream before batch `batch`, which is not long past."""
        with self._lock:
            while self._oldest + len(self._before) <= batch:
                last = self._before[-1]
                taken = self._mixture.take(last, self._batch_size)
                self._before.append(tuple(int(n) for n in last + taken))
            return self._before[batch - self._oldest]

    def forget(self, batch: int) -> None:
        """Batches before `batch` will not be asked for again."""
        with self._lock:
            del self._before[: max(0, batch - self._oldest)]
            self._oldest = max(self._oldest, batch)
