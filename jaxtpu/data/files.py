"""Documents in files: text, JSON lines and Parquet, compressed or not."""

import glob
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from jaxtpu.data.records import Answer, BadRecord, Record, record_of
from jaxtpu.errors import ConfigError, UserError, nearest

_KINDS = (".txt", ".jsonl", ".parquet")
_COMPRESSED = (".gz", ".zst")
_SPLITS = ("train", "validation", "all")
_BUFFER = 1 << 20  # bytes decompressed at once


class FileSource:
    """The documents of the files that a glob finds, file by file in the order of their paths.

    A document belongs to the split `validation` by a hash of its text, so one text is in one
    split only, however often it occurs and whatever other files there are.
    """

    def __init__(self, source: str, pattern: str, fields: tuple[str, ...], percent: float):
        """Looks for the files; opens none.

        Args:
          source: as in the configuration, for errors.
          fields: `data.text_field`, and `data.answer_field` where that is set.
          percent: of the documents, in the split `validation`.

        Raises:
          ConfigError: no file is found, or one is of an unknown kind.
        """
        self._source, self._fields, self._percent = source, fields, percent
        found = glob.glob(os.path.expanduser(pattern), recursive=True)
        self._paths = sorted(path for path in found if os.path.isfile(path))
        if not self._paths:
            raise ConfigError("data.source", source, "finds no file.", _near_files(pattern))
        for path in self._paths:
            if _kind(path) not in _KINDS:
                raise ConfigError(
                    "data.source", source, f"{path} is of an unknown kind.",
                    f"Use {', '.join(_KINDS)}, also with .gz or .zst.",
                )  # fmt: skip
        stats = [(path, os.stat(path)) for path in self._paths]
        seen = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        key = json.dumps([seen, percent])
        self.version = hashlib.sha256(key.encode()).hexdigest()[:16]

    def documents(self, split: str, split_field: str) -> Iterator[Record]:
        """See `Source.documents`.

        Raises:
          UserError: a file is damaged.
        """
        if split not in _SPLITS:
            raise ConfigError(
                split_field, split, f"{self._source} has no such split.", nearest(split, _SPLITS)
            )
        return self._documents(split)

    def _documents(self, split: str) -> Iterator[Record]:
        for path in self._paths:
            try:
                for record in _read(path, self._fields):
                    if split == "all" or self._split_of(record) == split:
                        yield record
            except (OSError, pyarrow.ArrowException) as error:
                raise UserError(
                    f"data.source={self._source!r}: {path} is damaged ({error}). Repair it, or "
                    f"name a glob without it."
                ) from error

    def _split_of(self, record: Record) -> str:
        """Unreadable records count as training data."""
        if isinstance(record, BadRecord):
            return "train"
        parts = (record.prompt, record.answer) if isinstance(record, Answer) else (record,)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.encode() if isinstance(part, str) else part)
        share = int.from_bytes(digest.digest()[:8], "big") / 2**64
        return "validation" if share < self._percent / 100 else "train"


def _read(path: str, fields: tuple[str, ...]) -> Iterator[Record]:
    readers = {".txt": _read_text, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
    return readers[_kind(path)](path, fields)


def _read_text(path: str, fields: tuple[str, ...]) -> Iterator[Record]:
    if len(fields) > 1:
        raise ConfigError(
            "data.answer_field",
            fields[1],
            f"{path} has no fields.",
            "Use .jsonl or .parquet files.",
        )
    with _open(path) as file:
        yield _utf8(file.read(), path)


def _read_json_lines(path: str, fields: tuple[str, ...]) -> Iterator[Record]:
    first = True
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                values = json.loads(line)
            except UnicodeDecodeError as error:
                yield BadRecord(place, f"is not UTF-8 at byte {error.start}")
                continue
            except (ValueError, RecursionError) as error:
                yield BadRecord(place, f"is not JSON: {error}")
                continue
            missing = _missing(values, fields)
            if missing and first and isinstance(values, dict):
                _refuse_field(missing, fields, list(values), place)
            first = False
            if missing:
                yield BadRecord(place, f"has no field {missing!r}")
            else:
                yield record_of(tuple(values[name] for name in fields), place, fields)


def _read_parquet(path: str, fields: tuple[str, ...]) -> Iterator[Record]:
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if missing := next((name for name in fields if name not in names), None):
            _refuse_field(missing, fields, names, path)
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=list(fields)):
            columns = [batch.column(name).to_pylist() for name in fields]
            for values in zip(*columns, strict=True):
                number += 1
                yield record_of(values, f"{path}, row {number}", fields)


def _missing(values: Any, fields: tuple[str, ...]) -> str | None:
    if not isinstance(values, dict):
        return fields[0]
    return next((name for name in fields if name not in values), None)


def _refuse_field(missing: str, fields: tuple[str, ...], there: list[str], place: str) -> None:
    field = "data.text_field" if missing == fields[0] else "data.answer_field"
    suggestion = nearest(missing, there) if there else "Choose other files."
    raise ConfigError(field, missing, f"{place} has no such field.", suggestion)


def _utf8(data: bytes, place: str) -> Record:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(place, f"is not UTF-8 at byte {error.start}")


def _kind(path: str) -> str:
    """The suffix that says what is in a file, whatever compressed it."""
    path = pathlib.PurePath(path)
    return pathlib.PurePath(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def _open(path: str) -> BinaryIO:
    """A file to read, decompressed as its name says; raises OSError where that is cut short."""
    return io.BufferedReader(pyarrow.input_stream(path, compression="detect"), _BUFFER)


def _near_files(pattern: str) -> str:
    folder = pathlib.Path(os.path.expanduser(pattern)).parent
    if not glob.has_magic(str(folder)) and not folder.is_dir():
        return f"There is no folder {folder}."
    return "For example: files:corpus/**/*.jsonl"
