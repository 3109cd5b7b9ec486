"""Packing against a slow reading of what it promises, and answers that alone are learned."""

import numpy as np
import pytest

from jaxtpu.data.packing import pack, packed
from jaxtpu.data.records import Answer
from jaxtpu.data.tokenise import write_tokens
from jaxtpu.data.tokenizer import ByteTokenizer
from jaxtpu.data.tokens import TokenStream


@pytest.fixture
def write(tmp_path):
    """The stream of documents, written and read as the cache does."""

    def make(documents, answers=False):
        paths = {name: tmp_path / name for name in ("tokens", "starts")}
        counted = tmp_path / "counted" if answers else None
        told = write_tokens(documents, ByteTokenizer(), "test", 0.0, counted=counted, **paths)
        return TokenStream(
            np.fromfile(paths["tokens"], told["dtype"]), 256, told["counts"]["used"],
            told["num_bytes"], "bytes", np.fromfile(paths["starts"], "<i8"),
            np.fromfile(counted, "u1") if answers else None,
        )  # fmt: skip

    return make


def documents(count, longest, seed=0):
    random = np.random.default_rng(seed)
    return [random.bytes(random.integers(1, longest)) for _ in range(count)]


def test_rows_hold_every_piece_once_and_no_more_than_they_can():
    random = np.random.default_rng(0)
    for room in (1, 7, 64, 500):
        lengths = random.integers(1, room + 1, 2000)
        order, rows = pack(lengths, room)
        assert sorted(order) == list(range(2000))
        assert all(
            0 < lengths[order[a:b]].sum() <= room for a, b in zip(rows, rows[1:], strict=False)
        )
        # At most 11/9 of the least, and a row more.
        assert len(rows) - 1 <= 11 / 9 * -(-lengths.sum() // room) + 1


def _bytes(arrays):
    return [array.astype("i4").tobytes() for array in arrays]


@pytest.mark.parametrize("length", [5, 32, 1000])
def test_packed_examples_are_the_documents(write, length):
    texts = documents(200, 90)
    stream = packed(write(texts), length)
    batch = stream.example_batch(np.arange(stream.examples(length)), length)
    pieces = []
    for row in range(len(batch["inputs"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            here = batch["segment_ids"][row] == segment
            assert batch["positions"][row][here].tolist() == list(range(here.sum()))
            pieces.append((batch["inputs"][row][here], batch["targets"][row][here]))
    expected = []
    for text in texts:
        ids = np.array([256, *text, 256])
        for at in range(0, len(text) + 1, length):
            end = min(at + length, len(text) + 1)
            expected.append((ids[at:end], ids[at + 1 : end + 1]))
    assert sorted(map(_bytes, pieces)) == sorted(map(_bytes, expected))
    real = batch["segment_ids"] > 0
    np.testing.assert_array_equal(batch["weights"], real)
    for name in ("inputs", "targets", "positions"):
        assert not batch[name][~real].any()
    assert stream.efficiency == pytest.approx(real.mean())


def test_documents_of_mixed_lengths_waste_under_three_percent(write):
    random = np.random.default_rng(0)
    texts = [b"x" * int(n) for n in np.clip(random.lognormal(5, 1.5, 3000), 1, 20_000)]
    assert packed(write(texts), 512).efficiency > 0.97


def test_a_row_of_padding_is_empty(write):
    stream = packed(write(documents(9, 20)), 32)
    batch = stream.example_batch(np.array([-1, 0]), 32)
    assert not any(values[0].any() for values in batch.values())
    assert batch["weights"][1].any()


@pytest.mark.parametrize("packing", [False, True])
def test_only_answers_and_their_ends_are_learned(write, packing):
    records = [Answer("what? ", "this"), Answer(b"", b"that"), Answer("why? ", "so")]
    stream = write(records, answers=True)
    stream = packed(stream, 40) if packing else stream
    batch = stream.example_batch(np.arange(stream.examples(40, partial=True)), 40)
    learned = batch["targets"][batch["weights"] > 0]
    text = "".join("|" if i == 256 else chr(i) for i in learned)
    # One stream has nothing before its first start, and nothing after its last token.
    assert sorted(text.split("|")) == (
        ["", "so", "that", "this"] if packing else ["so", "that", "this"]
    )


def test_the_plan_is_kept_and_made_anew_where_it_is_damaged(write, tmp_path):
    import dataclasses

    stream = dataclasses.replace(write(documents(50, 30)), folder=tmp_path / "kept")
    first = packed(stream, 16)
    (file,) = (tmp_path / "kept").iterdir()
    again = packed(stream, 16)
    np.testing.assert_array_equal(again.pieces, first.pieces)
    file.write_bytes(file.read_bytes()[:-50])
    np.testing.assert_array_equal(packed(stream, 16).pieces, first.pieces)
