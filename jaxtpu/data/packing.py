"""Packing: whole documents into sequences of a fixed length, with as little padding as can be.

A document that is longer than a sequence is cut into pieces of that length. The pieces are placed
longest first, each where the least room is left that takes it (best-fit decreasing; within 11/9 of
the best number of bins: Johnson et al. 1974, doi:10.1137/0203025; documents of mixed lengths fill
nearly every sequence).
"""

import dataclasses
import os
import pathlib
import uuid
import zipfile

import numpy as np

from jaxtpu.data.progress import told_if_slow
from jaxtpu.data.tokens import TokenStream


def pack(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Places pieces of `lengths`, each 1 to `room`, into rows of `room`.

    Returns:
      (order, rows): `order[rows[i] : rows[i + 1]]` are the indices of the pieces of row i.
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows_with = [[] for _ in range(room + 1)]  # by the room that is left
    some_with = 0  # bit r: there is a row with room r
    count = 0
    for piece in order.tolist():
        length = int(lengths[piece])
        enough = some_with >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                some_with &= ~(1 << left)
        else:
            row, left, count = count, room, count + 1
        row_of[piece] = row
        if left > length:
            rows_with[left - length].append(row)
            some_with |= 1 << (left - length)
    by_row = np.argsort(row_of, kind="stable")
    return by_row, np.searchsorted(row_of[by_row], np.arange(count + 1))


@dataclasses.dataclass(frozen=True)
class PackedStream:
    """The examples of a stream that are packed from its documents; no target is in two of them.

    Attributes:
      stream: tokens.
      sequence_length: of an example.
      pieces: [pieces, 2] int64: where each starts in the stream, and its tokens; row after row.
      rows: [examples + 1] int64: the pieces of example i are `rows[i]` to `rows[i + 1]`.
    """

    stream: TokenStream
    sequence_length: int
    pieces: np.ndarray
    rows: np.ndarray

    def __getattr__(self, name: str):
        return getattr(self.stream, name)  # tokens, documents, bytes: those of the stream

    @property
    def efficiency(self) -> float:
        """The part of the examples' tokens that is no padding."""
        return self.stream.num_tokens / (self.examples(self.sequence_length) * self.sequence_length)

    def examples(self, sequence_length: int, *, partial: bool = False) -> int:
        """Number of examples; each is padded, so none is partial."""
        assert sequence_length == self.sequence_length
        return len(self.rows) - 1

    def left_over(self, sequence_length: int) -> int:
        """Targets in no example: none."""
        return 0

    def example_batch(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """As `TokenStream.example_batch`; a segment is a document, or a piece of one. The target of
        a document's last token is the start of a document, whatever comes next in the row."""
        shape = (len(indices), sequence_length)
        at = np.zeros(shape, np.int64)
        segment_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, index in enumerate(np.asarray(indices).tolist()):
            column = 0
            pieces = self.pieces[self.rows[index] : self.rows[index + 1]] if index >= 0 else ()
            for segment, (start, length) in enumerate(pieces, 1):
                part = slice(column, column + length)
                at[row, part] = start + np.arange(length)
                segment_ids[row, part] = segment
                positions[row, part] = np.arange(length)
                column += length
        inputs, targets, counts = self.stream.read(at)
        real = segment_ids > 0
        return {
            "inputs": inputs * real,
            "targets": targets * real,
            "segment_ids": segment_ids,
            "positions": positions,
            "weights": (real & counts).astype(np.float32),
        }


def packed(stream: TokenStream, sequence_length: int) -> PackedStream:
    """`stream`, packed; the plan is kept beside its tokens, for later runs."""
    path = stream.folder / f"packed-{sequence_length}.npz" if stream.folder else None
    plan = _read(path, stream) if path else None
    if plan is None:
        with told_if_slow(f"Packing {stream.num_documents:,} documents"):
            plan = _plan(stream, sequence_length)
        if path:
            _write(path, stream, plan)
    return PackedStream(stream, sequence_length, *plan)


def _plan(stream: TokenStream, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.asarray(stream.starts, np.int64)
    lengths = np.diff(np.append(starts, stream.num_tokens))
    parts = -(-lengths // sequence_length)
    first = np.cumsum(parts) - parts  # the number of each document's first piece
    number = np.arange(parts.sum()) - np.repeat(first, parts)  # of a piece within its document
    piece_starts = np.repeat(starts, parts) + number * sequence_length
    rest = np.repeat(lengths, parts) - number * sequence_length
    piece_lengths = np.minimum(rest, sequence_length)
    order, rows = pack(piece_lengths, sequence_length)
    return np.stack([piece_starts, piece_lengths], 1)[order], rows.astype(np.int64)


def _read(path: pathlib.Path, stream: TokenStream) -> tuple[np.ndarray, np.ndarray] | None:
    """The plan in a file; None where there is none, or it is another stream's."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if int(file["num_tokens"]) != stream.num_tokens:
                return None
            return file["pieces"], file["rows"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(path: pathlib.Path, stream: TokenStream, plan: tuple[np.ndarray, np.ndarray]) -> None:
    """Whole or not at all; the plan is used all the same where the folder cannot be written."""
    partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.npz")
    try:
        path.parent.mkdir(exist_ok=True)
        np.savez(partial, pieces=plan[0], rows=plan[1], num_tokens=stream.num_tokens)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
