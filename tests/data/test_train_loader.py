import gc
import itertools
import json
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtpu.data import loader as loader_module
from jaxtpu.data.batch import batch_spec
from jaxtpu.data.loader import TrainLoader, local_indices
from jaxtpu.data.order import Position, epoch_order
from jaxtpu.errors import ConfigError

LENGTH = 16
ROWS = 8  # a multiple of the devices
SEED = 5


@pytest.fixture
def make_loader(stream, sharding):
    """Loaders that are closed at the end, of 8 rows unless told otherwise."""
    made = []

    def make(**arguments):
        values = {
            "stream": stream,
            "batch_size": ROWS,
            "sequence_length": LENGTH,
            "seed": SEED,
            "start": Position(0, SEED),
            "sharding": sharding,
        } | arguments
        made.append(TrainLoader(values.pop("stream"), **values))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def take(loader, count):
    """(batch as numpy, position) of the next batches."""
    return [(jax.tree.map(np.asarray, b), p) for b, p in itertools.islice(loader, count)]


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "jaxtpu-prefetch"]


def test_batches_are_the_epochs_one_after_the_other(stream, make_loader):
    number = stream.examples(LENGTH)
    count = 3 * number // ROWS + 1
    assert number % ROWS, "the case of a batch that crosses into the next epoch"
    order = np.concatenate([epoch_order(number, SEED, epoch) for epoch in range(4)])
    for i, (batch, position) in enumerate(take(make_loader(), count)):
        expected = stream.example_batch(order[i * ROWS : (i + 1) * ROWS], LENGTH)
        assert position == Position((i + 1) * ROWS, SEED)
        for name in expected:
            np.testing.assert_array_equal(batch[name], expected[name], err_msg=f"{i} {name}")


def test_an_epoch_holds_every_training_target_once(stream, make_loader):
    number = stream.examples(LENGTH)
    taken = take(make_loader(), -(-number // ROWS))
    rows = np.concatenate([batch["targets"] for batch, _ in taken])[:number]
    expected = stream.example_batch(np.arange(number), LENGTH)["targets"]
    assert sorted(map(bytes, rows)) == sorted(map(bytes, expected))


def test_a_resumed_run_gets_the_same_batches(stream, make_loader):
    per_epoch = stream.examples(LENGTH) // ROWS
    whole = take(make_loader(), per_epoch + 6)
    for at in (0, 1, per_epoch - 1, per_epoch, per_epoch + 1):
        _, position = whole[at]
        start = Position.from_json(json.loads(json.dumps(position.to_json())))
        for (a, p), (b, q) in zip(take(make_loader(start=start), 4), whole[at + 1 :], strict=False):
            assert p == q
            for name in a:
                assert a[name].tobytes() == b[name].tobytes()


def test_another_batch_size_goes_on_with_the_same_examples(make_loader):
    small = np.concatenate([b["inputs"] for b, _ in take(make_loader(), 5)])
    large = make_loader(batch_size=2 * ROWS, start=Position(ROWS, SEED))
    np.testing.assert_array_equal(
        np.concatenate([b["inputs"] for b, _ in take(large, 2)]), small[ROWS:]
    )


def test_a_split_smaller_than_a_batch_is_repeated(make_stream, make_loader):
    stream = make_stream([b"x" * 20, b"y" * 20])
    (batch, _), *_ = take(make_loader(stream=stream, batch_size=2 * ROWS), 3)
    assert batch["weights"].all()


def test_the_order_depends_on_seed_and_epoch_alone():
    order = np.array(epoch_order(1000, SEED, 2))
    assert sorted(order) == list(range(1000))
    np.random.seed(1)
    np.testing.assert_array_equal(epoch_order(1000, SEED, 2), order)
    for other in (epoch_order(1000, SEED, 3), epoch_order(1000, SEED + 1, 2)):
        assert (other != order).mean() > 0.9
    assert epoch_order(8, 0, 0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]  # in every version of numpy


def test_batches_are_sharded_and_as_specified(make_loader, sharding):
    batch, _ = next(make_loader())
    spec = batch_spec(ROWS, LENGTH)
    assert list(batch) == list(spec)
    for name, values in batch.items():
        assert (values.shape, values.dtype) == (spec[name].shape, spec[name].dtype)
        assert values.sharding == sharding


def test_rows_and_columns_may_both_be_sharded(make_loader):
    assert jax.device_count() % 2 == 0, "conftest.py emulates 8"
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "sequence"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    both = take(make_loader(sharding=sharding), 2)
    for (a, _), (b, _) in zip(both, take(make_loader(), 2), strict=True):
        np.testing.assert_array_equal(a["segment_ids"], b["segment_ids"])


def test_a_process_reads_only_what_its_devices_hold():
    class TwoProcesses:
        """Devices 0 and 1 of 4 are ours, and hold rows 0, 1 and 4, 5, in half of the columns."""

        def addressable_devices_indices_map(self, shape):
            columns = slice(shape[1] // 2, None)
            return {0: (slice(4, 6), columns), 1: (slice(0, 2), columns)}

    rows, columns = local_indices(TwoProcesses(), (8, 6))
    assert (rows.tolist(), columns.tolist()) == ([0, 1, 4, 5], [3, 4, 5])


def test_batches_are_made_ahead(make_loader):
    loader = make_loader(prefetch=3)
    next(loader)
    deadline = time.monotonic() + 20
    while loader._prefetcher._ready.qsize() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader._prefetcher._ready.qsize() == 3
    waited = loader.wait_seconds
    assert waited > 0
    take(loader, 2)
    assert loader.wait_seconds - waited < 0.1  # they were ready


@pytest.mark.parametrize("broken", ["_take", "_to_device"])
def test_a_failure_in_the_thread_is_raised_with_its_cause(make_loader, monkeypatch, broken, capfd):
    working, calls = getattr(loader_module, broken), itertools.count()

    def fail_later(*arguments, **keywords):
        if next(calls) >= 2:
            raise OSError("the disk is gone")
        return working(*arguments, **keywords)

    monkeypatch.setattr(loader_module, broken, fail_later)
    loader = make_loader()
    for _ in range(2):  # and on every further call
        with pytest.raises(RuntimeError, match="OSError: the disk is gone") as caught:
            take(loader, 3)
        assert isinstance(caught.value.__cause__, OSError)
    assert not prefetch_threads()
    assert capfd.readouterr().err == ""


def test_close_ends_the_thread_at_once(make_loader):
    with make_loader() as loader:
        next(loader)
        assert prefetch_threads()
        start = time.monotonic()
    assert time.monotonic() - start < 1
    assert not prefetch_threads()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_a_forgotten_loader_ends_its_thread(stream, sharding):
    loader = TrainLoader(
        stream,
        batch_size=ROWS,
        sequence_length=LENGTH,
        seed=0,
        start=Position(0, 0),
        sharding=sharding,
    )
    next(loader)
    del loader
    gc.collect()
    assert not prefetch_threads()


def test_loaders_may_come_and_go(make_loader):
    for _ in range(20):
        with make_loader() as loader:
            next(loader)
    assert not prefetch_threads()


def test_the_interpreter_ends_while_batches_are_made():
    code = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtpu.data.loader import TrainLoader
from jaxtpu.data.order import Position
from jaxtpu.data.tokens import TokenStream
stream = TokenStream(np.arange(10_000, dtype=np.uint16) % 250, 256, 1, 9_999, "bytes")
sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
loader = TrainLoader(stream, batch_size=512, sequence_length=64, seed=0,
                     start=Position(0, 0), sharding=sharding)
next(loader)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_sequence_longer_than_the_split_is_refused(make_stream, make_loader):
    stream = make_stream([b"short"])
    with pytest.raises(ConfigError, match=r"data\.sequence_length=16.*Use at most 5\."):
        make_loader(stream=stream)
    take(make_loader(stream=stream, sequence_length=5), 1)


def test_another_seed_than_the_one_so_far_is_refused(make_loader):
    with pytest.raises(ConfigError, match=r"seed=5.*Use 3\."):
        make_loader(start=Position(64, 3))
