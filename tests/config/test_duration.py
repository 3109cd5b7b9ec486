"""Durations: every unit, scales, rounding; epochs and steps paired as in Keras."""

import pytest

from jaxtpu.config import Config, RunUnits, run_units, to_steps
from jaxtpu.config.duration import LARGEST_STEP, check_duration
from jaxtpu.errors import ConfigError

# 1000 steps; an epoch is 40 steps, a step 8 examples and 256 tokens.
UNITS = RunUnits(steps=1000, steps_per_epoch=40, batch_size=8, tokens_per_step=256)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (7, 7),
        ("7", 7),
        ("7 step", 7),
        ("7 steps", 7),
        ("7steps", 7),
        ("  7   steps ", 7),
        ("1 epoch", 40),
        ("2 epochs", 80),
        ("0.5 epochs", 20),
        ("80 examples", 10),
        ("8 example", 1),
        ("2560 tokens", 10),
        ("256 token", 1),
        ("5%", 50),
        ("5 %", 50),
        ("5 percent", 50),
        ("29%", 290),
        ("150%", 1500),
        # Scales.
        ("2k", 2000),
        ("2K", 2000),
        ("2k steps", 2000),
        ("3 M", 3_000_000),
        ("1B", 1_000_000_000),
        ("1G", 1_000_000_000),
        ("1e3", 1000),
        ("1E+3 steps", 1000),
        ("10_000", 10_000),
        ("1.6e4 examples", 2000),
        ("16k examples", 2000),
        ("2.56M tokens", 10_000),
        ("2.56B tokens", 10_000_000),
        ("0.256T tokens", 1_000_000_000),
        # Rounding: to the nearest whole step, but never from something to nothing.
        ("12 examples", 2),
        ("9 examples", 1),
        ("1 example", 1),
        ("1 token", 1),
        ("0.01%", 1),
        ("0.001%", 1),
        ("0.14%", 1),
        ("0.16%", 2),
        ("0.01 epochs", 1),
        # Zero stays zero.
        (0, 0),
        ("0", 0),
        ("0%", 0),
        ("0.0 epochs", 0),
        ("0 tokens", 0),
        ("-0", 0),
    ],
)
def test_a_duration_in_steps(value, steps):
    assert to_steps("x", value, UNITS) == steps
    assert isinstance(to_steps("x", value, UNITS), int)


@pytest.mark.parametrize(
    "value",
    ["", " ", "%", "steps", "1.2.3", ".", "-1", "-5%", "1e", "0x10", "1,000", "5 % of it", "nan"]
    + ["inf", "1e999", "5 parsecs", "5 k k", "1 epoch 2 steps", True, None, [3], float("nan")]
    + [float("inf"), -1, 10**400, b"3"],
    ids=repr,
)
def test_what_is_no_duration(value):
    with pytest.raises(ConfigError) as error:
        check_duration("train.log_every", value)
    assert error.value.field == "train.log_every"
    assert error.value.value is value
    assert error.value.suggestion


@pytest.mark.parametrize(
    ("value", "suggestion"),
    [
        ("5 stps", "Did you mean '5 steps'?"),
        ("3 Epochs", "Did you mean '3 epochs'?"),
        ("5 kilometres", "Choose from: steps, epochs, examples, tokens, percent."),
        ("2m", "Did you mean '2M'?"),
        ("2b", "Did you mean '2B'?"),
    ],
)
def test_a_unit_that_there_is_not(value, suggestion):
    with pytest.raises(ConfigError) as error:
        to_steps("x", value, UNITS)
    assert error.value.suggestion == suggestion


def test_an_integral_float_is_an_int():
    config = Config()
    config.train.steps = 1e6
    assert config.train.steps == 1_000_000 and isinstance(config.train.steps, int)
    config.train.steps = "1e6 examples"
    assert config.train.steps == "1e6 examples"


def test_what_cannot_be_worked_out():
    unknown = RunUnits(None, None, 8, 256)
    assert to_steps("x", "80 examples", unknown) == 10
    with pytest.raises(ConfigError, match="percentage of itself"):
        to_steps("train.steps", "5%", unknown)
    with pytest.raises(ConfigError, match="Set train.steps_per_epoch"):
        to_steps("train.steps", "2 epochs", unknown)


def test_more_steps_than_an_int32_counts():
    assert to_steps("x", LARGEST_STEP, UNITS) == LARGEST_STEP
    for value in (LARGEST_STEP + 1, "1e308 epochs", "10T"):
        with pytest.raises(ConfigError, match=f"no more than {LARGEST_STEP}"):
            to_steps("x", value, UNITS)


def units_of(examples: int | None = 1000, **train) -> RunUnits:
    """Of a run in batches of 8 sequences of 32 tokens, with the fields of `train` set."""
    config = Config()
    config.data.update({"batch_size": 8, "sequence_length": 32})
    config.train.update(train)
    return run_units(config, examples)


@pytest.mark.parametrize(
    ("train", "steps", "steps_per_epoch"),
    [
        ({"epochs": 3}, 375, 125),
        ({"epochs": 3, "steps_per_epoch": 50}, 150, 50),
        ({"steps": "3 epochs"}, 375, 125),
        ({"steps": "3 epochs", "steps_per_epoch": 50}, 150, 50),
        ({"steps": "0.5 epochs"}, 62, 125),
        ({"steps": 300}, 300, 125),
        ({"steps": 300, "steps_per_epoch": 50}, 300, 50),
        ({"steps": "2k examples"}, 250, 125),
        ({"steps": "2560 tokens"}, 10, 125),
    ],
)
def test_epochs_and_steps_as_in_keras(train, steps, steps_per_epoch):
    units = units_of(**train)
    assert (units.steps, units.steps_per_epoch) == (steps, steps_per_epoch)
    assert (units.batch_size, units.tokens_per_step) == (8, 256)


def test_an_epoch_is_the_whole_batches_of_one_pass():
    assert units_of(1007, steps=1).steps_per_epoch == 125
    assert units_of(3, epochs=2).steps == 2  # less than a batch, yet a step


def test_without_the_size_of_the_data_steps_per_epoch_must_be_set():
    assert units_of(None, steps=10).steps_per_epoch is None
    assert units_of(None, epochs=2, steps_per_epoch=5).steps == 10
    with pytest.raises(ConfigError, match="Set train.steps_per_epoch") as error:
        units_of(None, epochs=2)
    assert error.value.field == "train.epochs"


def test_a_duration_that_fails_late_is_told_at_once():
    with pytest.raises(ConfigError) as error:
        units_of(steps=10, log_every="1e300 epochs")
    assert error.value.field == "train.log_every"
