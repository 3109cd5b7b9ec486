import numpy as np
import pytest

from jaxtpu.data.batch import batch_spec

LENGTHS = (1, 2, 7, 32, 1000, 5000)


def slow_example(tokens, index, length):
    """One example, told token by token."""
    row = {"inputs": [], "targets": [], "segment_ids": [], "positions": [], "weights": []}
    segment, position = 0, 0
    for column in range(length):
        at = index * length + column
        if at + 1 >= len(tokens):
            for name in row:
                row[name].append(0)
            continue
        if column == 0 or tokens[at] == 256:
            segment, position = segment + 1, 0
        values = (tokens[at], tokens[at + 1], segment, position, 1)
        for name, value in zip(row, values, strict=True):
            row[name].append(int(value))
        position += 1
    return row


@pytest.mark.parametrize("length", LENGTHS)
def test_examples_equal_a_slow_reference(stream, length):
    indices = np.arange(stream.examples(length, partial=True))
    batch = stream.example_batch(indices, length)
    expected = [slow_example(stream.tokens, index, length) for index in indices]
    for name, values in batch.items():
        np.testing.assert_array_equal(values, [row[name] for row in expected], err_msg=name)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_target_is_in_exactly_one_example(stream, length):
    batch = stream.example_batch(np.arange(stream.examples(length, partial=True)), length)
    real = batch["weights"] == 1
    np.testing.assert_array_equal(batch["targets"][real], stream.tokens[1:])
    np.testing.assert_array_equal(batch["inputs"][real], stream.tokens[:-1])


@pytest.mark.parametrize("length", LENGTHS)
def test_training_examples_are_never_padded(stream, length):
    number = stream.examples(length)
    assert number * length <= stream.num_tokens - 1 < (number + 1) * length
    assert stream.example_batch(np.arange(number), length)["weights"].all()


def test_index_minus_one_is_padding(stream):
    batch = stream.example_batch(np.array([-1, 3]), 16)
    assert all(not values[0].any() and values[1].any() for values in batch.values())


def test_the_arrays_are_those_of_the_spec(stream):
    spec, batch = batch_spec(4, 16), stream.example_batch(np.arange(4), 16)
    assert list(spec) == list(batch)
    for name, values in batch.items():
        assert (values.shape, values.dtype) == (spec[name].shape, spec[name].dtype), name
