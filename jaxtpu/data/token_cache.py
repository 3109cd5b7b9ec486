"""The token cache: a split is tokenised once into a file, which later runs map into memory."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable

import numpy as np

from jaxtpu.data.progress import told_if_slow
from jaxtpu.data.sources import open_source
from jaxtpu.data.tokenizer import Tokenizer
from jaxtpu.data.tokens import TokenStream
from jaxtpu.errors import ConfigError

_FORMAT = 1  # of the files below; a higher one makes every split be tokenised anew
_TOKENS, _MANIFEST = "tokens.bin", "manifest.json"


def open_tokens(
    *,
    source: str,
    split: str,
    tokenizer: Tokenizer,
    directory: str,
    text_field: str = "text",
    split_field: str = "data.train_split",
) -> TokenStream:
    """The tokens of one split, from their file where that exists.

    The file is one of a folder `directory/tokens/KEY`, whose key stands for all that the tokens
    depend on. The folder gets its name when it is complete, so that of several processes that
    make it at once, all read the same one, and one that is killed leaves nothing that counts.

    Args:
      source: see `sources.open_source`, also for `text_field`.
      split: see `sources.documents`, also for `split_field`.
      directory: holds prepared data, shared by runs; `~` is expanded.

    Raises:
      ConfigError: see `sources.open_source` and `sources.documents`; no document has any text.
      UserError: the data set cannot be prepared.
    """
    opened = open_source(source, directory, text_field)
    identity = {
        "format": _FORMAT,
        "source": source,
        "version": opened.version,
        "split": split,
        "text_field": text_field,
        "tokenizer": tokenizer.name,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = pathlib.Path(directory).expanduser() / "tokens" / key
    stream = _read(folder)
    if stream is None:
        documents = opened.documents(split, split_field)
        with told_if_slow(f"Tokenising {source}, split {split}"):
            stream = _write(folder, identity, documents, tokenizer)
    if stream.num_documents == 0:
        raise ConfigError(split_field, split, f"no document of {source} in it has any text.")
    return stream


def _read(folder: pathlib.Path) -> TokenStream | None:
    """The stream in `folder`; None where there is none, or it is not whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if (folder / _TOKENS).stat().st_size != manifest["file_bytes"]:
            return None
        dtype, length = np.dtype(manifest["dtype"]), manifest["file_bytes"]
        # An empty file cannot be mapped.
        tokens = np.memmap(folder / _TOKENS, dtype, "r") if length else np.zeros(0, dtype)
    except (OSError, ValueError):
        return None
    return TokenStream(
        tokens,
        document_start=manifest["document_start"],
        num_documents=manifest["num_documents"],
        num_bytes=manifest["num_bytes"],
        tokenizer=manifest["identity"]["tokenizer"],
    )


def _write(
    folder: pathlib.Path,
    identity: dict,
    documents: Iterable[str | bytes],
    tokenizer: Tokenizer,
) -> TokenStream:
    """Tokenises `documents` into `folder`, and reads it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex}")
    unfinished.mkdir()
    try:
        _write_files(unfinished, identity, documents, tokenizer)
        _rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    stream = _read(folder)
    if stream is None:
        raise OSError(f"The tokens written to {folder} cannot be read back.")
    return stream


def _write_files(
    folder: pathlib.Path, identity: dict, documents: Iterable[str | bytes], tokenizer: Tokenizer
) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    separator = np.array([tokenizer.document_start], dtype).tobytes()
    num_documents = num_bytes = 0
    with open(folder / _TOKENS, "wb") as file:
        for document in documents:
            text = document.encode("utf-8") if isinstance(document, str) else document
            if not text:
                continue
            file.write(separator)
            file.write(tokenizer.encode(text).astype(dtype).tobytes())
            num_documents += 1
            num_bytes += len(text)
        file.flush()
        os.fsync(file.fileno())  # or a host that dies could leave the length without the bytes
        length = file.tell()
    manifest = {
        "identity": identity,
        "dtype": dtype.str,
        "file_bytes": length,
        "document_start": tokenizer.document_start,
        "num_documents": num_documents,
        "num_bytes": num_bytes,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _rename(unfinished: pathlib.Path, folder: pathlib.Path) -> None:
    """Gives `unfinished` the name `folder`, unless another process has made that meanwhile.

    What has the name but is not whole is moved away: a folder cannot be renamed onto another.
    """
    while _read(folder) is None:
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            with contextlib.suppress(FileNotFoundError):  # another process has moved it
                broken = folder.rename(unfinished.with_name(unfinished.name + "-broken"))
                shutil.rmtree(broken, ignore_errors=True)
