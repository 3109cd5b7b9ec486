"""Which images of a split can be used, and their files as one file, kept for later runs."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator

import numpy as np

from jaxtpu.config import Config
from jaxtpu.data.records import Counts

_FORMAT = 1  # of the files below; a higher one makes every split be looked at anew
_IMAGES, _INDEX, _MANIFEST = "images.bin", "index.npz", "manifest.json"


def identity_key(config: Config, split: str, version: list) -> str:
    """Stands for all that the usable images of a split depend on."""
    known = [_FORMAT, config.data.source, split, config.model.vision.channels]
    text = json.dumps([*known, config.data.max_bad, version])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is known of a split.

    Attributes:
      numbers: of the usable records in the source, int64 [N].
      labels: of those, int32 [N].
      counts: what became of all.
      file: of their bytes, where those are kept.
      ends: where each ends in it, int64 [N + 1], the first 0.
    """

    numbers: np.ndarray
    labels: np.ndarray
    counts: Counts
    file: int | None
    ends: np.ndarray

    def read(self, index: int) -> bytes:
        """The bytes of an image. Safe for several threads; takes no memory that stays."""
        start, end = int(self.ends[index]), int(self.ends[index + 1])
        parts = []
        while start < end:
            part = os.pread(self.file, end - start, start)
            if not part:
                raise OSError(f"the file of images ends before image {index}.")
            parts.append(part)
            start += len(part)
        return b"".join(parts)


class KeptImages:
    """A folder `directory/images/KEY`, which gets its name when it is complete."""

    def __init__(self, directory: str, key: str):
        self._folder = pathlib.Path(directory).expanduser() / "images" / key
        self._unfinished = self._folder.with_name(f"{key}.tmp-{uuid.uuid4().hex}")
        self._sizes = [0]

    def read(self) -> Kept | None:
        """None where there is nothing, or it is not whole."""
        try:
            manifest = json.loads((self._folder / _MANIFEST).read_text())
            with np.load(self._folder / _INDEX, allow_pickle=False) as index:
                numbers, labels, ends = index["numbers"], index["labels"], index["ends"]
            file = None
            if manifest["copied"]:
                if (self._folder / _IMAGES).stat().st_size != int(ends[-1]):
                    return None
                file = os.open(self._folder / _IMAGES, os.O_RDONLY)
            return Kept(numbers, labels, Counts(**manifest["counts"]), file, ends)
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None

    @contextlib.contextmanager
    def writing(self, copy: bool) -> Iterator[Callable[[bytes], None]]:
        """Gives the function that takes the bytes of each usable image, in order."""
        self._unfinished.mkdir(parents=True)
        try:
            with open(self._unfinished / _IMAGES, "wb") as self._file:

                def write(data: bytes) -> None:
                    if copy:
                        self._file.write(data)
                        self._sizes.append(len(data))

                self._copied = copy
                yield write
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def finish(self, numbers: np.ndarray, labels: np.ndarray, counts: Counts) -> Kept:
        """Gives the folder its name, unless another process has done so meanwhile; reads it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        ends = np.cumsum(self._sizes, dtype=np.int64)
        np.savez(self._unfinished / _INDEX, numbers=numbers, labels=labels, ends=ends)
        manifest = {"copied": self._copied, "counts": dataclasses.asdict(counts)}
        (self._unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if (kept := self.read()) is not None:
            return kept
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._unfinished.rename(self._folder)
        except OSError:
            if not self._folder.exists():
                raise
        kept = self.read()
        if kept is None:
            raise OSError(f"The images written to {self._folder} cannot be read back.")
        return kept
