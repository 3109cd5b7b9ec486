import collections
import dataclasses
import math

import numpy as np
import pytest

from jaxtpu.data import entropy


def slow_entropies(tokens):
    """Both entropies, counted one by one."""
    pairs = collections.Counter(
        (int(a), int(b)) for a, b in zip(tokens[:-1], tokens[1:], strict=True) if b < 256
    )
    total = sum(pairs.values())
    bytes_, contexts = collections.Counter(), collections.Counter()
    for (a, b), count in pairs.items():
        bytes_[b] += count
        contexts[a] += count
    unigram = -sum(n * math.log2(n / total) for n in bytes_.values()) / total
    bigram = -sum(n * math.log2(n / contexts[a]) for (a, _), n in pairs.items()) / total
    return unigram, bigram


def test_known_texts(make_stream):
    assert entropy.byte_entropies(make_stream([b"aaaa"])) == (0, 0)
    assert entropy.byte_entropies(make_stream([b"abababab"])) == (1, 0)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_chunks_change_nothing(make_stream, monkeypatch, chunk):
    monkeypatch.setattr(entropy, "_CHUNK", chunk)
    random = np.random.default_rng(1)
    texts = [bytes(random.integers(0, 5, 40).tolist()) for _ in range(9)]
    stream = make_stream(texts)
    assert entropy.byte_entropies(stream) == pytest.approx(slow_entropies(stream.tokens))


def test_other_tokens_are_refused(stream):
    with pytest.raises(ValueError, match="bytes"):
        entropy.byte_entropies(dataclasses.replace(stream, tokenizer="words"))
