"""How well a look-up table could predict a text: the measure that a model must beat."""

import numpy as np

from jaxtpu.data.tokens import TokenStream

_CHUNK = 1 << 22  # tokens
_IDS = 257  # 256 bytes and the document start


def byte_entropies(stream: TokenStream) -> tuple[float, float]:
    """(unigram, bigram) entropy of the stream's text, in bits per byte of text.

    Unigram: of each byte by itself. Bigram: of each byte given the one before it (or given that
    the document starts). That is what a look-up table reaches which knows the frequencies in this
    very text; document starts are not counted as something to predict.

    Raises:
      ValueError: the stream was not made by the tokenizer `bytes`.
    """
    if stream.tokenizer != "bytes":
        raise ValueError(f"byte_entropies needs the tokenizer bytes, not {stream.tokenizer}")
    pairs = np.zeros(_IDS * _IDS, np.int64)
    for start in range(0, stream.num_tokens - 1, _CHUNK):
        chunk = stream.tokens[start : start + _CHUNK + 1].astype(np.int64)
        pairs += np.bincount(chunk[:-1] * _IDS + chunk[1:], minlength=_IDS * _IDS)
    following = pairs.reshape(_IDS, _IDS)[:, :256]
    num_bytes = following.sum()
    unigram = _surprise(following.sum(axis=0)) / num_bytes
    bigram = sum(_surprise(row) for row in following) / num_bytes
    return float(unigram), float(bigram)


def _surprise(counts: np.ndarray) -> float:
    """Bits to tell apart all that `counts` counts, at its own frequencies."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) if counts.size else 0.0
