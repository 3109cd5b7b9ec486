"""Mixtures: shares, epochs of each source, and exact resumption."""

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxtpu.data.loader import TrainLoader, evaluation_batches
from jaxtpu.data.mixture import Mixture, Schedule, parse_mixture
from jaxtpu.data.order import Position
from jaxtpu.data.packing import packed
from jaxtpu.errors import ConfigError
from tests.data.conftest import stream_of

LENGTH, ROWS, SEED = 16, 8, 5
NEW = Position(0, SEED)


def mixture_of(entries, sizes, length=1):
    """A mixture of streams whose bytes say which stream they are of."""
    random = np.random.default_rng(0)
    streams = tuple(
        stream_of([random.integers(32 * which, 32 * which + 32, size, np.uint8).tobytes()])
        for which, size in enumerate(sizes)
    )
    shares = parse_mixture(entries)
    return Mixture(tuple(share.source for share in shares), streams, shares, length)


def take(mixture, sharding, count, start=NEW, rows=ROWS):
    with TrainLoader(
        mixture, batch_size=rows, sequence_length=LENGTH, seed=SEED, start=start, sharding=sharding
    ) as loader:
        return [(jax.tree.map(np.asarray, b), p) for b, p in itertools.islice(loader, count)]


def sources(batch):
    return np.where(batch["targets"][:, :4].max(axis=1) < 256, batch["targets"][:, 0] // 32, -1)


def test_weights_become_shares():
    first, second = parse_mixture(["3 tfds:a", " 1->0  files:b c/*.txt"])
    assert (first.source, first.first, first.last) == ("tfds:a", 0.75, 1.0)
    assert (second.source, second.first, second.last) == ("files:b c/*.txt", 0.25, 0.0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["python_corpus"], r"data\.mixture='python_corpus'.*WEIGHT SOURCE"),
        (["x python_corpus"], r"data\.mixture='x python_corpus'"),
        (["-1 a", "2 b"], r"data\.mixture='-1 a'"),
        (["nan a"], r"data\.mixture='nan a'"),
        (["1->x a"], r"data\.mixture='1->x a'"),
        (["0 a", "0->1 b"], r"no weight above 0"),
        (["1 a", "2 a"], r"data\.mixture='a'.*more than once"),
    ],
)
def test_a_wrong_entry_is_told_with_one_that_would_work(entries, message):
    with pytest.raises(ConfigError, match=message):
        parse_mixture(entries)


@pytest.mark.parametrize("batch", [1, 3, 8, 64])
def test_every_stream_is_within_two_examples_of_its_share(batch):
    mixture = mixture_of(["5->1 a", "3 b", "0.01 c", "0->2 d"], [999] * 4, length=700)
    schedule = Schedule(mixture, (0, 0, 0, 0), batch)
    for number in range(1, 1500 // batch):
        before, after = schedule.before(number - 1), schedule.before(number)
        assert all(b <= a for b, a in zip(before, after, strict=True))
        assert sum(after) == batch * number
        assert np.abs(np.array(after) - mixture.due(batch * number)).max() < 2
    assert mixture.due(1500).sum() == pytest.approx(1500)


def test_each_stream_is_gone_through_in_epochs_of_its_own(sharding):
    mixture = mixture_of(["3 a", "1 b"], [LENGTH * 30 + 1, LENGTH * 7 + 1])
    taken = take(mixture, sharding, 40)
    rows = collections.defaultdict(list)
    for batch, _ in taken:
        assert len(set(sources(batch))) == 2  # mixed in each batch
        for row, source in enumerate(sources(batch)):
            rows[source].append(bytes(batch["targets"][row]))
    assert taken[-1][1].taken == (240, 80)
    for source, size in ((0, 30), (1, 7)):
        for epoch in range(len(rows[source]) // size):
            assert len(set(rows[source][epoch * size : (epoch + 1) * size])) == size
    assert rows[0][:30] != rows[0][30:60]  # shuffled anew


@pytest.mark.parametrize("packing", [False, True])
def test_a_resumed_run_gets_the_same_batches(sharding, packing):
    mixture = mixture_of(["3->1 a", "1 b", "0.2 c"], [700, 300, 90], length=400)
    if packing:
        streams = [stream_of([b"x" * n for n in range(1, 40)]), stream_of([b"y" * 9] * 30)]
        streams = tuple(packed(with_starts(stream), LENGTH) for stream in streams)
        mixture = Mixture(("a", "b"), streams, parse_mixture(["2 a", "1->3 b"]), 300)
    whole = take(mixture, sharding, 50)
    for at in (0, 1, 13, 30):
        start = Position.from_json(whole[at][1].to_json())
        again = take(mixture, sharding, 6, start)
        for (batch, position), (expected, place) in zip(again, whole[at + 1 :], strict=False):
            assert position == place
            for name in expected:
                np.testing.assert_array_equal(batch[name], expected[name])


def with_starts(stream):
    return dataclasses.replace(stream, starts=np.flatnonzero(stream.tokens == 256))


def test_another_batch_size_goes_on_with_the_next_examples(sharding):
    mixture = mixture_of(["2 a", "1 b"], [LENGTH * 90 + 1, LENGTH * 90 + 1])
    first = take(mixture, sharding, 5)
    rest = take(mixture, sharding, 5, first[-1][1], rows=16)
    rows = [bytes(row) for batch, _ in first + rest for row in batch["targets"]]
    assert len(set(rows)) == len(rows) == 5 * 8 + 5 * 16


def test_another_number_of_sources_is_refused(sharding):
    mixture = mixture_of(["2 a", "1 b"], [300, 300])
    with pytest.raises(ConfigError, match=r"data\.mixture='a, b'.*has 1 sources"):
        take(mixture, sharding, 1, Position(8, SEED))


def test_evaluation_has_every_target_of_every_stream_once(sharding):
    mixture = mixture_of(["2 a", "1 b"], [333, 101])
    batches = list(
        evaluation_batches(mixture, batch_size=ROWS, sequence_length=LENGTH, sharding=sharding)
    )
    targets = np.concatenate(
        [np.asarray(b["targets"])[np.asarray(b["weights"]) > 0] for b in batches]
    )
    expected = np.concatenate([stream.tokens[1:] for stream in mixture.streams])
    assert sorted(targets) == sorted(expected)
