"""Files of tokens that were made elsewhere, mapped into memory as they are."""

import pathlib

import numpy as np

from jaxtpu.data.records import Counts
from jaxtpu.data.tokenizer import Tokenizer
from jaxtpu.data.tokens import TokenStream, give_back
from jaxtpu.errors import ConfigError

_CHUNK = 1 << 22  # tokens looked at at once


class TokenFiles:
    """`tokens:FILE.npy`: ids of one dimension; `{split}` in the name stands for the split."""

    def __init__(self, source: str, pattern: str):
        self._source, self._pattern = source, pattern

    def tokens(
        self, split: str, split_field: str, tokenizer: Tokenizer, cache_bytes: int
    ) -> TokenStream:
        """The stream of a split, whose documents `tokenizer.document_start` leads.

        Raises:
          ConfigError: there is no such file, it holds no ids, or some that the tokenizer has not.
        """
        path = pathlib.Path(self._pattern.replace("{split}", split)).expanduser()
        if "{split}" not in self._pattern and split_field != "data.train_split":
            raise ConfigError(
                split_field, split, f"{self._source} is one file, which is trained on.",
                "Use tokens:FOLDER/{split}.npy, or data.validation_split= for none.",
            )  # fmt: skip
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ConfigError(
                "data.source", self._source, f"{path} cannot be read: {reason}.",
                "Name a file that numpy.save wrote.",
            ) from None  # fmt: skip
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
            raise ConfigError(
                "data.source", self._source,
                f"{path} holds {tokens.dtype} of shape {tokens.shape}, not one row of ids.",
                "Save a one-dimensional array of uint16 or uint32.",
            )  # fmt: skip
        starts = self._starts(path, tokens, tokenizer)
        count = len(starts)
        return TokenStream(
            tokens,
            document_start=tokenizer.document_start,
            num_documents=count,
            num_bytes=0,
            tokenizer=tokenizer.name,
            starts=starts,
            counts=Counts(read=count, used=count),
            folder=path.parent / f"{path.name}.jaxtpu",
            cache_bytes=cache_bytes,
        )

    def _starts(self, path: pathlib.Path, tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
        """Where documents start, int64; the first, whatever leads it."""
        starts = [np.zeros(1, np.int64)]
        for at in range(0, len(tokens), _CHUNK):
            chunk = np.asarray(tokens[at : at + _CHUNK])
            if chunk.min() < 0 or chunk.max() >= tokenizer.vocab_size:
                wrong = int(np.argmax((chunk < 0) | (chunk >= tokenizer.vocab_size)))
                raise ConfigError(
                    "data.tokenizer", tokenizer.name,
                    f"has {tokenizer.vocab_size} ids, and token {at + wrong} of {path} is "
                    f"{int(chunk[wrong])}.", "Use ids:VOCABULARY:SEPARATOR of that file.",
                )  # fmt: skip
            found = at + np.flatnonzero(chunk == tokenizer.document_start)
            starts.append(found[found > 0])
            give_back(tokens)
        return np.concatenate(starts)
