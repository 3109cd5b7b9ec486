"""Schedules, masks and the chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtpu.config import OptimizerConfig, RunUnits
from jaxtpu.errors import ConfigError
from jaxtpu.optimizer import make_optimizer, make_schedule

UNITS = RunUnits(steps=100, steps_per_epoch=50, batch_size=8, tokens_per_step=80)
PARAMS = {
    "a": {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")},
    "b": {"scale": jax.ShapeDtypeStruct((4,), "float32")},
}


def optimizer_config(**values) -> OptimizerConfig:
    config = OptimizerConfig()
    config.update(values)
    return config


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "rsqrt", "wsd"])
def test_a_schedule_rises_to_its_peak_and_ends_where_it_should(name):
    config = optimizer_config(schedule=name, learning_rate=2.0, warmup="10%", final_fraction=0.1)
    schedule = make_schedule(config, UNITS)
    rates = np.array([float(schedule(step)) for step in range(101)])
    assert rates[0] == pytest.approx(0.2)  # the first step already learns
    assert rates[10] == pytest.approx(2.0) == rates.max()
    last = {"constant": 2.0, "rsqrt": 2.0 * (10 / 100) ** 0.5}.get(name, 0.2)
    assert rates[100] == pytest.approx(last, rel=1e-5)
    assert (np.diff(rates[:10]) > 0).all() and (np.diff(rates[10:]) <= 1e-6).all()
    if name == "wsd":
        assert (rates[10:81] == rates[10]).all() and rates[81] < rates[80]


def test_with_steps_apart_the_schedule_is_of_updates():
    schedule = make_schedule(optimizer_config(accumulate_steps=4, warmup=40), UNITS)
    assert float(schedule(9)) == pytest.approx(1e-3)
    optimizer = make_optimizer(optimizer_config(accumulate_steps=4, warmup=40), UNITS, PARAMS)
    assert float(optimizer.learning_rate(39)) == pytest.approx(1e-3)
    assert float(optimizer.learning_rate(3)) == float(optimizer.learning_rate(0))


def test_a_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match=r"optimizer\.warmup=200"):
        make_schedule(optimizer_config(warmup=200), UNITS)


@pytest.mark.parametrize("name", ["adamw", "adam", "adafactor", "lion", "sgd"])
def test_weight_decay_shrinks_kernels_and_spares_scales(name):
    config = optimizer_config(name=name, warmup=0, weight_decay=0.5, learning_rate=0.1)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), PARAMS)
    optimizer = make_optimizer(config, UNITS, PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, 1.0, optimizer.init(params), params)
    expected = 0.0 if name == "adam" else -0.1 * 0.5
    np.testing.assert_allclose(updates["a"]["kernel"], expected, atol=1e-7)
    np.testing.assert_allclose(updates["b"]["scale"], 0.0, atol=1e-7)


def test_adamw_is_the_optax_optimizer_of_that_name():
    config = optimizer_config(schedule="constant", warmup=0, no_decay=(".*/scale",), clip_norm=0.5)
    ours = make_optimizer(config, UNITS, PARAMS)
    mask = {"a": {"kernel": True}, "b": {"scale": False}}
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask),
    )
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype("f4"), PARAMS)
    state, reference = ours.init(params), theirs.init(params)
    for _ in range(3):
        gradient = jax.tree.map(lambda p: random.normal(size=p.shape).astype("f4"), params)
        updates, state = ours.update(gradient, 1.0, state, params)
        expected, reference = theirs.update(gradient, reference, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
        params = optax.apply_updates(params, updates)
