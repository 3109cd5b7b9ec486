import numpy as np
import pytest

from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.errors import ConfigError


def test_text_survives_a_round_trip():
    tokenizer = make_tokenizer("bytes")
    text = "def f():\n    return 'é 中 🙂'\n"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.max() < tokenizer.document_start == 256 < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)


def test_decode_takes_whatever_a_model_samples():
    assert make_tokenizer("bytes").decode(np.array([256, 104, 105, 300, 255])) == "hi\ufffd"


def test_an_unknown_name_is_told_with_the_nearest():
    with pytest.raises(ConfigError, match=r"data\.tokenizer='byte'.*Did you mean 'bytes'\?"):
        make_tokenizer("byte")
