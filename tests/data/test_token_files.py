"""Tokens that were made elsewhere, and data sets that `datasets` saved."""

import datasets
import numpy as np
import pytest

from jaxtpu.data.hugging_face import HuggingFaceSource
from jaxtpu.data.packing import packed
from jaxtpu.data.records import Answer
from jaxtpu.data.token_cache import Selection, open_tokens
from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.errors import ConfigError

IDS = [99, 5, 6, 99, 7, 8, 9, 99, 1]


def tokens(source, split="train", name="ids:100:99", field="data.train_split"):
    return open_tokens(Selection(source, split, field), make_tokenizer(name), "/nowhere")


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32"])
def test_a_file_is_read_as_it_is(tmp_path, dtype):
    np.save(tmp_path / "train.npy", np.array(IDS, dtype))
    stream = tokens(f"tokens:{tmp_path}/{{split}}.npy")
    assert stream.tokens.tolist() == IDS
    assert (stream.num_documents, stream.starts.tolist()) == (3, [0, 3, 7])
    rows = packed(stream, 4).example_batch(np.arange(3), 4)["inputs"]
    assert sorted(map(tuple, rows.tolist())) == [(99, 1, 0, 0), (99, 5, 6, 0), (99, 7, 8, 9)]


@pytest.mark.parametrize(
    ("saved", "arguments", "message"),
    [
        (None, {}, r"data\.source=.*train\.npy cannot be read: No such file"),
        (np.array([[1, 2]]), {}, r"shape \(1, 2\), not one row"),
        (np.array([1.5]), {}, r"holds float64"),
        (np.array([], "u2"), {}, r"shape \(0,\)"),
        (np.array([1, 2, 100]), {}, r"data\.tokenizer='ids:100:99'.*token 2 of .* is 100"),
        (np.array([1, -2]), {}, r"token 1 of .* is -2"),
        (np.array(IDS), {"field": "data.validation_split"}, r"data\.validation_split='train'"),
    ],
)
def test_what_is_no_tokens_is_told(tmp_path, saved, arguments, message):
    if saved is not None:
        np.save(tmp_path / "train.npy", saved)
    with pytest.raises(ConfigError, match=message):
        tokens(f"tokens:{tmp_path}/train.npy", **arguments)


def test_objects_are_not_unpickled(tmp_path):
    np.save(tmp_path / "train.npy", np.array([print], object), allow_pickle=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens(f"tokens:{tmp_path}/train.npy")


def test_saved_data_sets_are_read(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "reply": ["a", "b"], "n": [1, 2]})
    both = datasets.DatasetDict({"train": rows, "test": rows.select([1])})
    both.save_to_disk(str(tmp_path / "both"))
    rows.save_to_disk(str(tmp_path / "one"))
    source = HuggingFaceSource("hf:x", str(tmp_path / "both"), ("text", "reply"))
    assert list(source.documents("test", "f")) == [Answer("two", "b")]
    source = HuggingFaceSource("hf:x", str(tmp_path / "one"), ("text",))
    assert list(source.documents("train", "f")) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"f='tset'"):
        source.documents("tset", "f")
    with pytest.raises(ConfigError, match=r"data\.text_field='txt'.*Did you mean 'text'"):
        HuggingFaceSource("hf:x", str(tmp_path / "one"), ("txt",))
    with pytest.raises(ConfigError, match=r"data\.source='hf:x'.*no saved data set"):
        HuggingFaceSource("hf:x", str(tmp_path), ("text",))


def test_reading_takes_no_more_memory_than_it_may(tmp_path):
    """Of 160 MB in a file, all read, no more than 40 MB and what one place maps are held."""
    np.save(tmp_path / "train.npy", np.zeros(80_000_000, np.uint16))
    selection = Selection(f"tokens:{tmp_path}/train.npy", "train")
    before, most = _mapped_mb(), 0
    stream = open_tokens(selection, make_tokenizer("ids:100:99"), "", 40 * 2**20)
    for rows in np.array_split(np.random.default_rng(0).permutation(stream.examples(20_000)), 60):
        stream.example_batch(rows, 20_000)
        most = max(most, _mapped_mb() - before)
    assert 0 < most < 45


def _mapped_mb() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1000 for line in file if line.startswith("RssFile"))
