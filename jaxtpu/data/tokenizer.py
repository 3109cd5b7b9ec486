"""Tokenizers: text to ids and back."""

import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jaxtpu.errors import ConfigError, nearest

# What tokenizers call the token that leads or ends a document, the most telling first.
_SEPARATORS = ("<|begin_of_text|>", "<bos>", "<s>", "[BOS]", "<|endoftext|>", "<|im_start|>",
               "<eos>", "</s>", "[EOS]", "[SEP]")  # fmt: skip


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    Attributes:
      name: as in `data.tokenizer`.
      version: two tokenizers of one name and version give the same ids.
      vocab_size: ids are in [0, vocab_size).
      document_start: the id that separates documents; no text encodes to it.
    """

    name: str
    version: str
    vocab_size: int
    document_start: int

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, [tokens], unsigned integers, without a document start.

        Raises:
          UnicodeDecodeError: the bytes are not UTF-8, and the tokenizer needs that.
        """
        ...

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each; by several threads where the library can."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, [tokens], any integers."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of the text in UTF-8; 256 starts a document."""

    name = "bytes"
    version = "1"
    vocab_size = 257
    document_start = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes of `text`, [bytes] uint16."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD.

        Ids from 256 up are left out: the document start, and the ids that a model has beyond
        `vocab_size` where its embedding is padded to a rounder size.
        """
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the library `tokenizers`, as `transformers` saves beside its models."""

    def __init__(self, name: str, path: str, separator: str):
        import tokenizers

        file = pathlib.Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        data = _contents(name, file, "hf:FOLDER with a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises no kind of its own
            raise ConfigError("data.tokenizer", name, f"{file} cannot be read: {error}") from error
        # In a document, `<s>` is three characters; and it is as long as it is.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name, self.version = name, hashlib.sha256(data).hexdigest()[:16]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        special = self._tokenizer.get_added_tokens_decoder()
        names = {token.content: i for i, token in special.items() if token.special}
        self.document_start = _separator(name, names, separator)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, [tokens] uint32."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each, by all cores."""
        encodings = self._tokenizer.encode_batch_fast(
            [_text(text) for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, without special tokens and ids that no text has."""
        ids = np.asarray(ids)
        return self._tokenizer.decode(ids[ids < self.vocab_size].tolist(), skip_special_tokens=True)


class SentencePieceTokenizer:
    """A model of the library `sentencepiece`."""

    def __init__(self, name: str, path: str, separator: str):
        import sentencepiece

        data = _contents(name, pathlib.Path(path).expanduser(), "sentencepiece:FILE.model")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        except Exception as error:  # the library raises no kind of its own
            raise ConfigError("data.tokenizer", name, f"cannot be read: {error}") from error
        self.name, self.version = name, hashlib.sha256(data).hexdigest()[:16]
        self.vocab_size = self._model.vocab_size()
        ids = (self._model.bos_id(), self._model.eos_id())
        names = {self._model.id_to_piece(i): i for i in ids if i >= 0}
        self.document_start = _separator(name, names, separator)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, [tokens] uint32."""
        return np.array(self._model.encode(_text(text)), np.uint32)

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each, by several threads."""
        return [np.array(ids, np.uint32) for ids in self._model.encode([_text(t) for t in texts])]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, without ids that no text has."""
        ids = np.asarray(ids)
        return self._model.decode(ids[ids < self.vocab_size].tolist())


class Ids:
    """Tokens whose tokenizer is not here: `ids:VOCABULARY:SEPARATOR`. It shows numbers for text."""

    def __init__(self, name: str, sizes: str, separator: str):
        numbers = sizes.split(":")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise ConfigError(
                "data.tokenizer", name, "is not of the form ids:VOCABULARY:SEPARATOR.",
                "For example: ids:50257:50256",
            )  # fmt: skip
        self.name, self.version = name, "1"
        self.vocab_size, self.document_start = map(int, numbers)
        if not self.document_start < self.vocab_size:
            raise ConfigError(
                "data.tokenizer", name, "the separator is no id of the vocabulary.",
                f"Use ids:{self.document_start + 1}:{self.document_start}.",
            )  # fmt: skip

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids written as decimal numbers, [tokens] uint32."""
        return np.array([int(word) for word in _text(text).split()], np.uint32)

    def encode_many(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """The ids as numbers."""
        return " ".join(str(int(i)) for i in ids)


_TOKENIZERS: dict[str, Callable[[str, str, str], Any]] = {
    "bytes": lambda name, path, separator: ByteTokenizer(),
    "hf": HuggingFaceTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "ids": Ids,
}


def make_tokenizer(name: str, separator: str = "") -> Tokenizer:
    """The tokenizer called `name` in the configuration: `bytes`, or KIND:PATH.

    Args:
      separator: `data.separator`.

    Raises:
      ConfigError: there is none of that name, or it cannot be read.
    """
    kind, colon, path = name.partition(":")
    if kind not in _TOKENIZERS or bool(path) == (kind == "bytes") or (colon and not path):
        forms = ("bytes", "hf:FOLDER", "sentencepiece:FILE.model", "ids:VOCABULARY:SEPARATOR")
        raise ConfigError(
            "data.tokenizer", name, "there is no such tokenizer.", nearest(name, forms)
        )
    return _TOKENIZERS[kind](name, path, separator)


def _text(text: str | bytes) -> str:
    return text.decode("utf-8") if isinstance(text, bytes) else text


def _contents(name: str, file: pathlib.Path, form: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            "data.tokenizer", name, f"{file} cannot be read: {error.strerror}.", f"Use {form}."
        ) from None


def _separator(name: str, names: dict[str, int], wanted: str) -> int:
    """The id of the token that leads a document."""
    if wanted:
        if wanted not in names:
            advice = nearest(wanted, names) if names else "Use another tokenizer."
            raise ConfigError("data.separator", wanted, f"{name} has no such token.", advice)
        return names[wanted]
    found = next((token for token in _SEPARATORS if token in names), None)
    if found is None:
        there = ", ".join(list(names)[:8]) or "no special token"
        raise ConfigError(
            "data.separator", "", f"{name} has none of the usual tokens that lead a document.",
            f"Name one of its own: {there}.",
        )  # fmt: skip
    return names[found]
