"""Tokenizers: text to ids and back."""

from typing import Protocol

import numpy as np

from jaxtpu.errors import ConfigError, nearest


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    Attributes:
      name: as in `data.tokenizer`; two tokenizers of one name give the same ids.
      vocab_size: ids are in [0, vocab_size).
      document_start: the id that separates documents; no text encodes to it.
    """

    name: str
    vocab_size: int
    document_start: int

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, [tokens], unsigned integers, without a document start."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, [tokens], any integers."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8; 256 starts a document."""

    name = "bytes"
    vocab_size = 257
    document_start = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes of `text`, [bytes] uint16."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD.

        Ids from 256 up are left out: the document start, and the ids that a model has beyond
        `vocab_size` where its embedding is padded to a rounder size.
        """
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


_TOKENIZERS = {ByteTokenizer.name: ByteTokenizer}


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name` in the configuration.

    Raises:
      ConfigError: there is none of that name.
    """
    if name not in _TOKENIZERS:
        raise ConfigError(
            "data.tokenizer", name, "there is no such tokenizer.", nearest(name, _TOKENIZERS)
        )
    return _TOKENIZERS[name]()
