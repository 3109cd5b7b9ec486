"""Tokenizers of other libraries against those libraries, and the one that we train."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from rich.console import Console

from jaxtpu.config import load
from jaxtpu.data.token_cache import Selection, open_tokens
from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.data.train_tokenizer import SEPARATOR, train_tokenizer
from jaxtpu.errors import ConfigError

TEXTS = ["def f(x):\n    return x + 1\n", "naïve → 日本語 🙂", f"a {SEPARATOR} in the text", " "]
LINES = [f"the {word} sat on the mat number {n}" for n, word in enumerate(["cat", "dog"] * 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set of lines, and tokenizers of both libraries that were trained on it."""
    folder = tmp_path_factory.mktemp("tokenizers")
    corpus = "".join(json.dumps({"text": text}) + "\n" for text in LINES)
    (folder / "lines.jsonl").write_text(corpus)
    (folder / "lines.txt").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines.txt"), model_prefix=str(folder / "sp"), vocab_size=300,
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, character_coverage=1.0,
    )  # fmt: skip
    fields = {"source": f"files:{folder}/lines.jsonl", "directory": str(folder / "d")}
    config = load(
        "configs/quickstart.py", [(f"data.{name}", value) for name, value in fields.items()]
    )
    assert train_tokenizer(config, 320, str(folder / "bpe"), Console(quiet=True), True) == 0
    return folder


@pytest.mark.parametrize(
    "kind", ["hf:{}/bpe", "hf:{}/bpe/tokenizer.json", "sentencepiece:{}/sp.model"]
)
def test_ids_are_those_of_the_library_and_give_the_text_back(folder, kind):
    made = make_tokenizer(kind.format(folder))
    if kind.startswith("hf"):
        library = tokenizers.Tokenizer.from_file(f"{folder}/bpe/tokenizer.json")
        library.encode_special_tokens = True
        expected = [library.encode(text).ids for text in LINES]
        assert made.decode(made.encode(TEXTS[1])) == TEXTS[1]  # any text at all
    else:
        library = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/sp.model")
        expected = [library.encode(text) for text in LINES]
    ids = made.encode_many(LINES)
    assert [i.tolist() for i in ids] == expected
    assert [made.decode(i) for i in ids] == LINES
    assert made.vocab_size > max(max(i) for i in ids)
    assert made.decode(np.array([made.vocab_size + 5])) == ""


@pytest.mark.parametrize("kind", ["hf:{}/bpe", "sentencepiece:{}/sp.model"])
def test_no_text_has_the_separator(folder, kind):
    made = make_tokenizer(kind.format(folder))
    for text in (*TEXTS, "<s>", "</s>", SEPARATOR, ""):
        assert made.document_start not in made.encode(text)
        assert made.encode(text.encode()).tolist() == made.encode(text).tolist()


def test_the_trained_one_has_the_size_asked_for_and_says_what_it_saves(folder):
    made = make_tokenizer(f"hf:{folder}/bpe")
    assert made.vocab_size == 320
    assert sum(map(len, made.encode_many(LINES))) < sum(map(len, LINES)) / 3


def test_tokens_are_kept_by_what_the_tokenizer_is_and_not_by_its_name(folder, tmp_path):
    selection = Selection(f"files:{folder}/lines.jsonl", "all")
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes((folder / "bpe/tokenizer.json").read_bytes())
    first = open_tokens(selection, make_tokenizer(f"hf:{tmp_path}"), str(tmp_path / "d"))
    document = first.tokens[first.starts[3] : first.starts[4]]
    assert document[0] == make_tokenizer(f"hf:{tmp_path}").document_start
    config = json.loads(copy.read_text())
    config["model"]["merges"] = config["model"]["merges"][:5]
    copy.write_text(json.dumps(config))
    second = open_tokens(selection, make_tokenizer(f"hf:{tmp_path}"), str(tmp_path / "d"))
    assert second.num_tokens > first.num_tokens


def test_bytes_that_are_no_text_are_a_bad_record(folder, tmp_path):
    from jaxtpu.data import tokenise

    made = make_tokenizer(f"hf:{folder}/bpe")
    paths = {name: tmp_path / name for name in ("tokens", "starts")}
    told = tokenise.write_tokens([b"good", b"b\xffd"], made, "test", 0.5, counted=None, **paths)
    assert told["counts"]["bad"] == 1
    assert told["counts"]["first_bad"] == "record 2: is not UTF-8 at byte 1"


def test_a_long_text_is_cut_where_nothing_is_lost(folder, monkeypatch):
    from jaxtpu.data import tokenise

    monkeypatch.setattr(tokenise, "_PIECE", 10)
    for text in ("naïve 日本語 " * 20, "日本語" * 30, "日本語".encode() * 30, b"\x80" * 50):
        pieces = list(tokenise._pieces(text))
        assert text[:0].join(pieces) == text
        assert max(map(len, pieces)) <= 13 and len(pieces) > 4


@pytest.mark.parametrize(
    ("name", "separator", "message"),
    [
        ("byte", "", r"data\.tokenizer='byte'.*Did you mean 'bytes'"),
        ("bytes:x", "", r"data\.tokenizer='bytes:x'"),
        ("hf:", "", r"data\.tokenizer='hf:'"),
        ("hf:{}/none", "", r"data\.tokenizer=.*cannot be read: No such file"),
        ("hf:{}/lines.txt", "", r"data\.tokenizer=.*cannot be read"),
        ("sentencepiece:{}/lines.txt", "", r"data\.tokenizer=.*cannot be read"),
        ("hf:{}/bpe", "<s>", r"data\.separator='<s>'.*no such token.*endoftext"),
        ("ids:100", "", r"data\.tokenizer='ids:100'.*ids:50257:50256"),
        ("ids:100:100", "", r"data\.tokenizer='ids:100:100'.*Use ids:101:100"),
    ],
)
def test_a_wrong_tokenizer_is_told_with_one_that_would_work(folder, name, separator, message):
    with pytest.raises(ConfigError, match=message):
        make_tokenizer(name.format(folder), separator)


def test_the_vocabulary_must_hold_the_bytes(folder):
    config = load("configs/quickstart.py", [])
    with pytest.raises(ConfigError, match=r"--vocab_size=100.*Use 8192"):
        train_tokenizer(config, 100, str(folder / "x"), Console(quiet=True), True)
