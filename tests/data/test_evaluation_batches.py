import numpy as np
import pytest

from jaxtpu.data.batch import batch_spec
from jaxtpu.data.loader import evaluation_batches

LENGTH = 32
ROWS = 8  # a multiple of the devices


def batches(stream, sharding, **arguments):
    arguments = {"batch_size": ROWS, "sequence_length": LENGTH, "sharding": sharding} | arguments
    return list(evaluation_batches(stream, **arguments))


def test_a_pass_holds_the_whole_stream_once(stream, sharding):
    found = batches(stream, sharding)
    real = np.concatenate([np.asarray(batch["weights"]) for batch in found]) == 1
    targets = np.concatenate([np.asarray(batch["targets"]) for batch in found])
    np.testing.assert_array_equal(targets[real], stream.tokens[1:])
    assert not real[-1].any()  # the last batch had to be filled up with padding
    assert len(found) == -(-stream.examples(LENGTH, partial=True) // ROWS)


def test_batches_are_sharded_and_as_specified(stream, sharding):
    spec = batch_spec(ROWS, LENGTH)
    for batch in batches(stream, sharding):
        for name, values in batch.items():
            assert (values.shape, values.dtype) == (spec[name].shape, spec[name].dtype)
            assert values.sharding == sharding


@pytest.mark.parametrize("limit", [0, 1, 3, 1000])
def test_a_limit_takes_the_first_batches(stream, sharding, limit):
    whole, some = batches(stream, sharding), batches(stream, sharding, max_batches=limit)
    assert len(some) == min(limit, len(whole))
    for a, b in zip(some, whole, strict=False):
        np.testing.assert_array_equal(a["inputs"], b["inputs"])
