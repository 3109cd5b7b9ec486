"""Tokens: the documents of a split as one stream, read as examples from anywhere in it."""

import dataclasses
import mmap
import pathlib

import numpy as np

from jaxtpu.data.records import Counts

_AROUND = 1 << 21  # bytes that the operating system may map around the one looked at: a huge page


class _Pages:
    """The pages of mapped files that have been looked at, given back when they are too many."""

    def __init__(self, limit: int):
        self._limit, self._touched = limit, 0

    def rows(self, row_bytes: int) -> int:
        """Rows, each of so many bytes in a place of its own, that may be looked at at once."""
        return max(1, self._limit // (row_bytes + _AROUND))

    def touch(self, rows: int, row_bytes: int, arrays: list[np.ndarray]) -> None:
        """Makes room for so many rows of `arrays`."""
        size = rows * (row_bytes + _AROUND)
        if self._touched + size > self._limit:
            self._touched = 0
            for array in arrays:
                give_back(array)
        self._touched += size


def give_back(array: np.ndarray) -> None:
    """Lets go of the pages of a mapped file; they are read again where they are looked at again."""
    if isinstance(mapped := getattr(array, "_mmap", None), mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """Every document of a split, one after the other, each led by `document_start`.

    Attributes:
      tokens: [num_tokens] uint16 or uint32, mapped from its file.
      document_start: the id that leads each document; the next one's ends a document.
      num_documents: documents that are not empty.
      num_bytes: bytes of their text in UTF-8; 0 where that is not known.
      tokenizer: name of the tokenizer.
      starts: [num_documents] int64, where each document starts in `tokens`.
      counted: [num_tokens] uint8, 1 for a token to be learned; None where all are.
      counts: what became of the records.
      folder: where more can be kept that is derived from the tokens.
      cache_bytes: host memory that mapped files may take.
    """

    tokens: np.ndarray
    document_start: int
    num_documents: int
    num_bytes: int
    tokenizer: str
    starts: np.ndarray | None = None
    counted: np.ndarray | None = None
    counts: Counts = Counts()  # noqa: RUF009 (frozen)
    folder: pathlib.Path | None = None
    cache_bytes: int = 2**31
    _pages: _Pages = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "_pages", _Pages(self.cache_bytes))

    @property
    def num_tokens(self) -> int:
        """Tokens, with the document starts."""
        return len(self.tokens)

    def examples(self, sequence_length: int, *, partial: bool = False) -> int:
        """Examples of `sequence_length` targets that share no target.

        Every token but the first is a target. Training leaves out the last few, which fill no
        whole example; evaluation counts them as an example too (`partial`).
        """
        num_targets = self.num_tokens - 1
        return -(-num_targets // sequence_length) if partial else num_targets // sequence_length

    def left_over(self, sequence_length: int) -> int:
        """Targets of a training epoch that are in no example."""
        return self.num_tokens - 1 - self.examples(sequence_length) * sequence_length

    def example_batch(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """The examples at `indices`, with the arrays of `batch_spec`.

        Example i has the targets 1 + i T to (i + 1) T of the stream, T = `sequence_length`. After
        a document's last token the target is the next document's start. A row that starts inside
        a document has it as segment 1, at position 0.

        Args:
          indices: [rows] integers, below `examples(sequence_length, partial=True)`; -1 gives a
            row of padding.

        Returns:
          Five arrays [rows, sequence_length]. Padding is 0 in all of them.
        """
        indices = np.asarray(indices, np.int64)[:, None]
        columns = np.arange(sequence_length)
        at = indices * sequence_length + columns
        real = (indices >= 0) & (at < self.num_tokens - 1)
        at = np.where(real, at, 0)
        inputs, targets, counts = self.read(at)
        starts = inputs == self.document_start
        starts[:, 0] = True
        segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
        segment_starts = np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
        positions = (columns - segment_starts).astype(np.int32)
        return {
            "inputs": inputs * real,
            "targets": targets * real,
            "segment_ids": segment_ids * real,
            "positions": positions * real,
            "weights": (real & counts).astype(np.float32),
        }

    def read(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, the tokens after them, whether those are to be learned), each of the shape of
        `at`. After the last token of all comes the start of a document."""
        row_bytes = at.shape[-1] * self.tokens.itemsize * 2
        block = self._pages.rows(row_bytes)
        blocks = [
            self._read(at[row : row + block], row_bytes) for row in range(0, max(1, len(at)), block)
        ]
        return tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))

    def _read(self, at: np.ndarray, row_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        files = [self.tokens] if self.counted is None else [self.tokens, self.counted]
        self._pages.touch(len(at) * len(files), row_bytes, files)
        after = at + 1
        last = after == self.num_tokens
        after = np.where(last, 0, after)
        inputs = self.tokens[at].astype(np.int32)
        targets = np.where(last, self.document_start, self.tokens[after]).astype(np.int32)
        counts = np.ones(at.shape, bool)
        if self.counted is not None:
            counts = last | (self.counted[after] > 0)
        return inputs, targets, counts
