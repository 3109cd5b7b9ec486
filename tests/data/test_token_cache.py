import concurrent.futures

import numpy as np
import pytest

from jaxtpu.data import sources
from jaxtpu.data.token_cache import Selection, open_tokens
from jaxtpu.data.tokenizer import ByteTokenizer
from jaxtpu.errors import ConfigError


class MemorySource:
    """A source of a kind that only this test knows."""

    def __init__(self, texts, version="1"):
        self.texts, self.version, self.reads = texts, version, 0

    def documents(self, split, split_field):
        self.reads += 1
        yield from self.texts


@pytest.fixture
def memory(monkeypatch):
    source = MemorySource(["né", "", b"bc"])
    monkeypatch.setitem(sources.SOURCE_KINDS, "memory", lambda *arguments: source)
    return source


def read(directory, split="train", tokenizer=None):
    tokenizer = tokenizer or ByteTokenizer()
    return open_tokens(Selection("memory", split), tokenizer, str(directory))


def test_documents_are_tokenised_once(memory, tmp_path):
    stream = read(tmp_path)
    assert stream.tokens.tolist() == [256, 110, 195, 169, 256, 98, 99]
    assert stream.tokens.dtype == np.uint16
    assert (stream.num_tokens, stream.num_bytes, stream.num_documents) == (7, 5, 2)
    again = read(tmp_path)
    np.testing.assert_array_equal(again.tokens, stream.tokens)
    assert (again.num_bytes, again.num_documents, memory.reads) == (5, 2, 1)


def test_all_that_tokens_depend_on_is_in_the_key(memory, tmp_path):
    class OtherTokenizer(ByteTokenizer):
        name, vocab_size = "other", 70_000

    read(tmp_path)
    read(tmp_path, split="validation")
    assert read(tmp_path, tokenizer=OtherTokenizer()).tokens.dtype == np.uint32
    memory.version = "2"
    read(tmp_path)
    assert memory.reads == 4
    assert len(list((tmp_path / "tokens").iterdir())) == 4


@pytest.mark.parametrize("name", ["tokens.bin", "manifest.json"])
def test_a_truncated_file_is_made_anew(memory, tmp_path, name):
    expected = np.array(read(tmp_path).tokens)
    (file,) = (tmp_path / "tokens").glob(f"*/{name}")
    file.write_bytes(file.read_bytes()[:-4])
    np.testing.assert_array_equal(read(tmp_path).tokens, expected)
    assert memory.reads == 2
    assert len(list((tmp_path / "tokens").iterdir())) == 1  # the broken one is gone


def test_a_failure_on_the_way_leaves_nothing(memory, tmp_path):
    memory.texts = ["whole", 17]
    with pytest.raises(TypeError):  # from the source: a record that is no text is a `BadRecord`
        read(tmp_path)
    assert not list((tmp_path / "tokens").iterdir())


def test_processes_may_race(memory, tmp_path):
    memory.texts = ["x" * 100_000] * 5
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: read(tmp_path), range(8)))
    assert {stream.tokens.sum() for stream in streams} == {5 * (256 + 120 * 100_000)}
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_documents_without_text_are_refused_every_time(memory, tmp_path):
    memory.texts = ["", b""]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"data\.train_split='train'.*no document"):
            read(tmp_path)
