"""Tokens: the documents of a split as one stream, read as examples from anywhere in it."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """Every document of a split, one after the other, each led by `document_start`.

    Attributes:
      tokens: [num_tokens] uint16 or uint32, mapped from its file.
      document_start: the id that leads each document; the next one's ends a document.
      num_documents: documents that are not empty.
      num_bytes: bytes of their text in UTF-8.
      tokenizer: name of the tokenizer.
    """

    tokens: np.ndarray
    document_start: int
    num_documents: int
    num_bytes: int
    tokenizer: str

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
        inputs = self.tokens[at].astype(np.int32)
        targets = self.tokens[at + 1].astype(np.int32)
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
            "weights": real.astype(np.float32),
        }
