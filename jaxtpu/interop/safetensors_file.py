"""The file format of safetensors: a JSON header, then the arrays' bytes.

A file is mapped into memory and its arrays are views of it, so that nothing is read but what is
used, and nothing of it is held twice.
"""

import dataclasses
import json
import math
import mmap
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from jaxtpu.errors import ConfigError

DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 100 * 2**20  # bytes, as the format has it


class SafetensorsFile:
    """The arrays of a file, by name.

    Raises:
      ConfigError: it is not such a file, or it is cut short.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(_MOST_HEADER, size - 8):
                    raise ValueError("it has no header")
                header = json.loads(file.read(length))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._start = 8 + length
            self._entries = {k: v for k, v in header.items() if k != "__metadata__"}
            for name, entry in self._entries.items():
                self._check(name, entry, size)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "--from", str(path), f"is no whole safetensors file: {error}.",
                "Download it again.",
            ) from None  # fmt: skip

    def _check(self, name: str, entry: dict, size: int) -> None:
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} is of {entry['dtype']}, which is not supported")
        needed = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
        if not (0 <= begin <= end <= size - self._start and end - begin == needed):
            raise ValueError(f"{name} is cut short")

    def names(self) -> list[str]:
        return list(self._entries)

    def __getitem__(self, name: str) -> np.ndarray:
        """The array as a view of the file; only what is read of it comes into memory."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        data = memoryview(self._map)[self._start + begin : self._start + end]
        return np.frombuffer(data, DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def forget(self) -> None:
        """Lets the system take back the memory of what was read."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array to be written: its name, shape and number format."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(path: pathlib.Path, entries: list[Entry], arrays: Iterator[np.ndarray]) -> None:
    """Writes `arrays`, in the order of `entries`, one at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, array in zip(entries, arrays, strict=True):
            assert array.shape == entry.shape and array.dtype == entry.dtype, entry
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    partial.replace(path)
