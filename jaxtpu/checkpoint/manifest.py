"""Manifests: a hash of every file of a checkpoint, written last, so that it is whole or known not
to be.

Each process hashes its share of the files and writes one part, `manifest/<i>-of-<n>.json`; the
checkpoint is whole when all parts are there and every file is what its part says. No process waits
for another.
"""

import concurrent.futures
import hashlib
import json
from typing import Any

from etils import epath

FOLDER = "manifest"
_CHUNK = 1 << 22
_THREADS = 4


def write_part(directory: epath.Path, process: int, processes: int) -> None:
    """Hashes this process's share of the files below `directory`, and writes its part.

    The part has its final name only once it is complete.
    """
    files = _files(directory)
    content = {
        "process": process,
        "processes": processes,
        "of": len(files),
        "files": _hashes(directory, files[process::processes]),
    }
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{process}-of-{processes}.json"
    partial = folder / f"{process}.partial"
    partial.write_text(_sealed(content))
    partial.replace(path)


def is_finished(directory: epath.Path) -> bool:
    """Whether every process has written its part: the save came to its end."""
    try:
        names = {path.name for path in (directory / FOLDER).iterdir()}
    except OSError:
        return False
    counts = {int(tail) for name in names if (tail := name[:-5].rpartition("-of-")[2]).isdigit()}
    return any(all(f"{i}-of-{n}.json" in names for i in range(n)) for n in counts if n)


def faults(directory: epath.Path) -> list[str]:
    """What is wrong with a checkpoint, a line a file; empty where it is whole. Reads all of it."""
    try:
        expected = listed(directory)
    except DamagedError as error:
        return [str(error)]

    def fault(name: str) -> str | None:
        path, (size, digest) = directory / name, expected[name]
        try:
            found = _hash(path)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if found[0] != size:
            return f"{name} has {found[0]} bytes, not {size}"
        return None if found[1] == digest else f"{name} has another content than was written"

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return [found for found in pool.map(fault, sorted(expected)) if found]


class DamagedError(Exception):
    """A manifest that cannot be believed."""


def listed(directory: epath.Path) -> dict[str, tuple[int, str]]:
    """(bytes, SHA-256) of every file, by its path in the checkpoint.

    Raises:
      DamagedError: the manifest cannot be believed.
    """
    if not is_finished(directory):
        raise DamagedError(
            f"its {FOLDER} is not complete: the save was cut short, or it was damaged"
        )
    expected: dict[str, tuple[int, str]] = {}
    counts = set()
    for path in sorted((directory / FOLDER).iterdir()):
        if path.suffix != ".json":
            continue
        content = _unsealed(path)
        counts.add((content["processes"], content["of"]))
        expected |= {name: (size, digest) for name, (size, digest) in content["files"].items()}
    if len(counts) != 1 or len(expected) != next(iter(counts))[1]:
        raise DamagedError(f"the parts of its {FOLDER} do not fit together")
    return expected


def _sealed(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def _unsealed(path: epath.Path) -> dict[str, Any]:
    try:
        digest, text = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{FOLDER}/{path.name} cannot be read: {error}") from None
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedError(f"{FOLDER}/{path.name} has another content than was written")
    return json.loads(text)


def _files(directory: epath.Path, prefix: str = "") -> list[str]:
    names = []
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            if prefix or path.name != FOLDER:
                names += _files(path, f"{prefix}{path.name}/")
        else:
            names.append(prefix + path.name)
    return names


def _hashes(directory: epath.Path, names: list[str]) -> dict[str, tuple[int, str]]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _hash(directory / name), names)
        return dict(zip(names, found, strict=True))


def _hash(path: epath.Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
