"""The token cache: a split is tokenised once into files, which later runs map into memory."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterable

import numpy as np

from jaxtpu.data.progress import told_if_slow
from jaxtpu.data.records import Counts, Record
from jaxtpu.data.sources import open_source
from jaxtpu.data.tokenise import write_tokens
from jaxtpu.data.tokenizer import Tokenizer
from jaxtpu.data.tokens import TokenStream
from jaxtpu.errors import ConfigError

_FORMAT = 2  # of the files below; a higher one makes every split be tokenised anew
TOKENS, MANIFEST, STARTS, COUNTED = "tokens.bin", "manifest.json", "starts.bin", "counted.bin"


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which documents, and how they are read; the fields of `data` that tokens depend on.

    Attributes:
      source: see `sources.open_source`.
      split: see `sources.Source.documents`.
      split_field: the field of the configuration that an error about the split names.
      fields: names of the text, and of the answer where the loss is on answers alone.
      validation_percent: of the documents of files, in the split `validation`.
      max_bad: fraction of the records that may be unreadable.
    """

    source: str
    split: str
    split_field: str = "data.train_split"
    fields: tuple[str, ...] = ("text",)
    validation_percent: float = 1.0
    max_bad: float = 0.0


def open_tokens(
    selection: Selection, tokenizer: Tokenizer, directory: str, cache_bytes: int = 2**31
) -> TokenStream:
    """The tokens of one split, from their files where those exist.

    They are in a folder `directory/tokens/KEY`, whose key stands for all that the tokens depend on.
    The folder gets its name when it is complete, so that of several processes that make it at
    once, all read the same one, and one that is killed leaves nothing that counts.

    Args:
      directory: holds prepared data, shared by runs; `~` is expanded.
      cache_bytes: host memory that the mapped files may take.

    Raises:
      ConfigError: see `sources.open_source` and `sources.Source.documents`; no document has any
        text.
      UserError: the data set cannot be prepared, or too many of its records cannot be read.
    """
    s = selection
    opened = open_source(s.source, directory, s.fields, s.validation_percent)
    if hasattr(opened, "tokens"):  # tokenised already
        return opened.tokens(s.split, s.split_field, tokenizer, cache_bytes)
    identity = {
        "format": _FORMAT,
        "source": s.source,
        "version": opened.version,
        "split": s.split,
        "fields": list(s.fields),
        "tokenizer": tokenizer.name,
        "tokenizer_version": tokenizer.version,
        "document_start": tokenizer.document_start,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = pathlib.Path(directory).expanduser() / "tokens" / key
    stream = _read(folder, cache_bytes)
    if stream is None:
        records = opened.documents(s.split, s.split_field)
        with told_if_slow(f"Tokenising {s.source}, split {s.split}"):
            _write(folder, identity, records, tokenizer, s)
        stream = _read(folder, cache_bytes)
        if stream is None:
            raise OSError(f"The tokens written to {folder} cannot be read back.")
    if stream.num_documents == 0:
        raise ConfigError(s.split_field, s.split, f"no document of {s.source} in it has any text.")
    return stream


def map_file(path: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    """A file as an array that is read where it is looked at; an empty file cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _read(folder: pathlib.Path, cache_bytes: int) -> TokenStream | None:
    """The stream in `folder`; None where there is none, or it is not whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for name, size in manifest["files"].items():
            if (folder / name).stat().st_size != size:
                return None
        dtype = np.dtype(manifest["dtype"])
        counted = COUNTED in manifest["files"]
        return TokenStream(
            map_file(folder / TOKENS, dtype),
            document_start=manifest["identity"]["document_start"],
            num_documents=manifest["counts"]["used"],
            num_bytes=manifest["num_bytes"],
            tokenizer=manifest["identity"]["tokenizer"],
            starts=map_file(folder / STARTS, np.dtype("<i8")),
            counted=map_file(folder / COUNTED, np.dtype("u1")) if counted else None,
            counts=Counts(**manifest["counts"]),
            folder=folder,
            cache_bytes=cache_bytes,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(
    folder: pathlib.Path,
    identity: dict,
    records: Iterable[Record],
    tokenizer: Tokenizer,
    selection: Selection,
) -> None:
    """Tokenises `records` into `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")
    unfinished.mkdir()
    try:
        paths = {name: unfinished / name for name in (TOKENS, STARTS, COUNTED)}
        manifest = write_tokens(
            records, tokenizer, selection.source, selection.max_bad,
            tokens=paths[TOKENS], starts=paths[STARTS],
            counted=paths[COUNTED] if len(selection.fields) > 1 else None,
        )  # fmt: skip
        sizes = {name: path.stat().st_size for name, path in paths.items() if path.exists()}
        manifest |= {"identity": identity, "files": sizes}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: pathlib.Path, folder: pathlib.Path) -> None:
    """Gives `unfinished` the name `folder`, unless another process has made that meanwhile.

    What has the name but is not whole is moved away: a folder cannot be renamed onto another.
    """
    while _read(folder, 0) is None:
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            with contextlib.suppress(FileNotFoundError):  # another process has moved it
                broken = folder.rename(unfinished.with_name(unfinished.name + "-broken"))
                shutil.rmtree(broken, ignore_errors=True)
