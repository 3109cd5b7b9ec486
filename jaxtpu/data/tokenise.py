"""Tokenising: the records of a split to files of tokens, with every record accounted for."""

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from jaxtpu.data.records import Answer, BadRecord, Counts, Record
from jaxtpu.data.tokenizer import Tokenizer
from jaxtpu.errors import UserError

_RECORDS = 256  # tokenised together, by all cores
_PIECE = 1 << 20  # characters of a text tokenised at once: it takes many times their memory


def write_tokens(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    source: str,
    max_bad: float,
    *,
    tokens: pathlib.Path,
    starts: pathlib.Path,
    counted: pathlib.Path | None,
) -> dict[str, Any]:
    """Writes the tokens of all documents, each led by the tokenizer's `document_start`.

    Args:
      max_bad: fraction of the records that may be unreadable.
      tokens: file of uint16, or uint32 for a vocabulary beyond that.
      starts: file of int64: where each document starts in `tokens`.
      counted: file of a byte for each token, 1 where it is to be learned; None where all are.

    Returns:
      `dtype` of the tokens, `num_bytes` of their text in UTF-8, and `counts` of the records.

    Raises:
      UserError: more records than `max_bad` cannot be read; the first is named.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    tally, length, num_bytes = Counts(), 0, 0
    with contextlib.ExitStack() as files:
        tokens_file, starts_file = (files.enter_context(open(p, "wb")) for p in (tokens, starts))
        counted_file = files.enter_context(open(counted, "wb")) if counted else None
        for chunk in _chunks(records):
            documents, tally = _sorted_out(chunk, tally, tokenizer)
            if max_bad == 0.0:
                check_counts(tally, source, max_bad)
            ids, marks, size = _encoded(documents, tokenizer)
            lengths = [len(document) for document in ids]
            np.array(length + np.cumsum([0, *lengths])[:-1], "<i8").tofile(starts_file)
            for document in ids:
                tokens_file.write(document.astype(dtype).tobytes())
            if counted_file:
                counted_file.write(np.concatenate([*marks, np.zeros(0, "u1")]).tobytes())
            length, num_bytes = length + sum(lengths), num_bytes + size
        _sync(tokens_file, starts_file, counted_file)
    check_counts(tally, source, max_bad)
    return {"dtype": dtype.str, "num_bytes": num_bytes, "counts": dataclasses.asdict(tally)}


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    records = iter(records)
    while chunk := list(itertools.islice(records, _RECORDS)):
        yield chunk


def _sorted_out(
    chunk: list[Record], tally: Counts, tokenizer: Tokenizer
) -> tuple[list[tuple], Counts]:
    """(documents as tuples of one text, or a prompt and an answer; the counts with these)."""
    documents, empty, bad, first = [], 0, 0, tally.first_bad
    for number, record in enumerate(chunk, tally.read + 1):
        if not isinstance(record, BadRecord):
            record = _checked(record, number, tokenizer)
        if isinstance(record, BadRecord):
            bad, first = bad + 1, first or str(record)
            continue
        parts = (record.prompt, record.answer) if isinstance(record, Answer) else (record,)
        if parts[-1]:
            documents.append(parts)
        else:
            empty += 1
    counts = Counts(
        tally.read + len(chunk), tally.used + len(documents), tally.empty + empty,
        tally.bad + bad, first,
    )  # fmt: skip
    return documents, counts


def _checked(record: Record, number: int, tokenizer: Tokenizer) -> Record:
    """Bytes that are not UTF-8 are a document for the byte tokenizer only."""
    if tokenizer.name == "bytes":
        return record
    parts = (record.prompt, record.answer) if isinstance(record, Answer) else (record,)
    for part in parts:
        if isinstance(part, bytes):
            try:
                part.decode("utf-8")
            except UnicodeDecodeError as error:
                return BadRecord(f"record {number}", f"is not UTF-8 at byte {error.start}")
    return record


def _encoded(documents: list[tuple], tokenizer: Tokenizer):
    """(ids of each document, whether each is to be learned, bytes of the text in UTF-8)."""
    pieces = [[list(_pieces(part)) for part in parts] for parts in documents]
    flat = [piece for parts in pieces for part in parts for piece in part]
    encoded = iter(tokenizer.encode_many(flat))
    lead = np.array([tokenizer.document_start], np.uint32)
    ids, marks = [], []
    for parts in pieces:
        arrays = [
            np.concatenate([next(encoded).astype(np.uint32) for _ in part] or [lead[:0]])
            for part in parts
        ]
        ids.append(np.concatenate([lead, *arrays]))
        # The first token is what the document before it ends with, which is to be learned.
        mark = [np.ones(1, "u1"), *(np.zeros(len(a), "u1") for a in arrays[:-1])]
        marks.append(np.concatenate([*mark, np.ones(len(arrays[-1]), "u1")]))
    size = sum(len(p.encode()) if isinstance(p, str) else len(p) for p in flat)
    return ids, marks, size


def _pieces(text: str | bytes) -> Iterator[str | bytes]:
    """`text` in parts of about `_PIECE`, cut at spaces where there are any."""
    space, newline = (" ", "\n") if isinstance(text, str) else (b" ", b"\n")
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            cut = max(text.rfind(space, start + 1, end), text.rfind(newline, start + 1, end))
            end = cut if cut > start else _whole_character(text, end)
        yield text[start:end]
        start = end


def _whole_character(text: str | bytes, end: int) -> int:
    """The end moved back to where a character of UTF-8 starts."""
    if isinstance(text, bytes):
        return next((e for e in range(end, end - 4, -1) if text[e] & 0xC0 != 0x80), end)
    return end


def check_counts(tally: Counts, source: str, max_bad: float) -> None:
    """Raises UserError, which names the first bad record, where more than `max_bad` of them are."""
    if tally.bad <= max_bad * tally.read:
        return
    if max_bad == 0.0:
        raise UserError(
            f"data.source={source!r}: {tally.first_bad}. Mend it, or set data.max_bad=0.01 to leave "
            f"out up to 1% of the records and count them."
        )
    raise UserError(
        f"data.source={source!r}: {tally.first_bad}. Of {tally.read:,} records, {tally.bad:,} cannot "
        f"be read, more than data.max_bad={max_bad:g} allows. Mend them, or use data.max_bad="
        f"{math.ceil(1000 * tally.bad / tally.read) / 1000:g}."
    )


def _sync(*files: BinaryIO | None) -> None:
    """Else a host that dies could leave the length of a file without its bytes."""
    for file in files:
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
