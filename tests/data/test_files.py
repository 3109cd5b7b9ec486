"""Documents in files: kinds, compression, splits, and what cannot be read."""

import gzip
import json
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxtpu.data.files import FileSource
from jaxtpu.data.records import Answer, BadRecord
from jaxtpu.data.token_cache import Selection, open_tokens
from jaxtpu.data.tokenizer import ByteTokenizer
from jaxtpu.errors import ConfigError, UserError

TEXTS = ["first", "second\nline", "dritté", "fourth " * 50]


def write(path, texts=TEXTS, **more):
    """`texts` in the form that the name of the file says."""
    lines = "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"n": range(len(texts)), "text": texts}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    else:
        path.write_bytes(lines)
    return path


def read(pattern, split="all", fields=("text",), percent=1.0):
    source = FileSource(f"files:{pattern}", str(pattern), fields, percent)
    return list(source.documents(split, "data.train_split"))


def tokens(pattern, directory, max_bad=0.0, **arguments):
    selection = Selection(f"files:{pattern}", "all", max_bad=max_bad, **arguments)
    return open_tokens(selection, ByteTokenizer(), str(directory))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_kind_of_file_gives_its_documents(tmp_path, name):
    assert read(write(tmp_path / name)) == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_files_that_were_compressed_apart_and_joined_are_read_to_their_end(tmp_path, name):
    data = write(tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data + data)
    assert read(tmp_path / name) == TEXTS + TEXTS


def test_a_text_file_is_a_document_and_files_come_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.txt").write_text("two\nlines\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert read(tmp_path / "**/*.txt*") == ["zipped", "two\nlines\n"]


def test_splits_share_no_text_and_hold_all(tmp_path):
    texts = [f"text {n % 400}" for n in range(800)]  # each twice
    path = write(tmp_path / "a.jsonl", texts)
    train, validation = (read(path, split, percent=20) for split in ("train", "validation"))
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(texts)
    assert 0.1 < len(validation) / len(texts) < 0.3
    other = write(tmp_path / "b.jsonl", texts[300:])  # the split of a text is its own
    assert set(read(other, "validation", percent=20)) <= set(validation)


def test_prompts_and_answers(tmp_path):
    path = write(tmp_path / "a.jsonl", answer="yes")
    assert read(path, fields=("text", "answer"))[0] == Answer("first", "yes")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{broken", "is not JSON"),
        (b'"text"', "has no field 'text'"),
        (b'{"n": 1}', "has no field 'text'"),
        (b'{"text": 7}', "text is int, not text"),
        (b'{"text": "\xff"}', "is not UTF-8 at byte 10"),
    ],
)
def test_a_bad_line_is_named_or_left_out_and_counted(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 99 + line + b"\n" + b'{"text": "good"}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl, line 100: {problem}.*data\.max_bad=0\.01"):
        tokens(path, tmp_path)
    stream = tokens(path, tmp_path, max_bad=0.01)
    assert (stream.counts.read, stream.counts.used, stream.counts.bad) == (101, 100, 1)
    assert f"line 100: {problem}" in str(stream.counts)
    assert tokens(path, tmp_path, max_bad=0.01).counts == stream.counts  # from the cache as well


def test_more_bad_records_than_allowed_are_refused_with_a_fraction_that_works(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 90 + b"no\n" * 10)
    with pytest.raises(UserError, match=r"100 records, 10 cannot.*data\.max_bad=0\.1") as caught:
        tokens(path, tmp_path, max_bad=0.05)
    assert "a.jsonl, line 91" in str(caught.value)
    advice = float(re.search(r"max_bad=([0-9.]+)\.$", str(caught.value))[1])
    assert tokens(path, tmp_path, max_bad=advice).counts.bad == 10


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_is_named_whatever_may_be_left_out(tmp_path, name):
    path = write(tmp_path / name, [str(n) for n in range(5000)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"{name} is damaged"):
        tokens(path, tmp_path, max_bad=1.0)
    assert not list((tmp_path / "tokens").iterdir())


@pytest.mark.parametrize(
    ("pattern", "arguments", "message"),
    [
        ("none/*.txt", {}, r"data\.source=.*no file.*no folder"),
        ("a.csv", {}, r"data\.source=.*a\.csv is of an unknown kind.*\.jsonl"),
        ("a.jsonl", {"fields": ("txt",)}, r"data\.text_field='txt'.*line 1.*Did you mean 'text'"),
        ("a.jsonl", {"fields": ("text", "b")}, r"data\.answer_field='b'"),
        ("a.parquet", {"fields": ("txt",)}, r"data\.text_field='txt'.*Did you mean 'text'"),
        ("a.jsonl", {"split": "trian"}, r"data\.train_split='trian'.*Did you mean 'train'"),
        ("a.txt", {"fields": ("text", "b")}, r"data\.answer_field='b'.*has no fields"),
    ],
)
def test_what_cannot_be_read_is_told_with_what_can(tmp_path, pattern, arguments, message):
    for name in ("a.csv", "a.jsonl", "a.parquet", "a.txt"):
        write(tmp_path / name)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / pattern, **arguments)


def test_files_that_changed_are_tokenised_anew(tmp_path):
    path = write(tmp_path / "a.jsonl", ["one"])
    assert tokens(path, tmp_path).num_documents == 1
    write(path, ["one", "two"])
    assert tokens(path, tmp_path).num_documents == 2


def test_a_document_of_fifty_megabytes_loses_nothing(tmp_path):
    random = np.random.default_rng(0)
    data = random.choice(np.frombuffer("abc dé\n".encode(), np.uint8), 50_000_000).tobytes()
    text = data.decode("utf-8", errors="ignore")
    (tmp_path / "a.txt").write_text(text)
    stream = tokens(tmp_path / "a.txt", tmp_path)
    assert stream.num_documents == 1
    assert stream.tokens[1:].astype(np.uint8).tobytes() == text.encode()


def test_bytes_that_are_not_utf8_are_a_bad_record(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    (record,) = read(tmp_path / "a.txt")
    assert record == BadRecord(str(tmp_path / "a.txt"), "is not UTF-8 at byte 3")
