"""Schedules, masks and the chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtpu.config import OptimizerConfig, RunUnits
from jaxtpu.errors import ConfigError
from jaxtpu.optimizer import make_optimizer, make_schedule
from jaxtpu.paths import flatten
from jaxtpu.precision import round_stochastically

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


@pytest.mark.parametrize("name", ["adamw", "adam", "adafactor", "lion", "muon", "sgd"])
def test_weight_decay_shrinks_kernels_and_spares_scales(name):
    config = optimizer_config(name=name, warmup=0, weight_decay=0.5, learning_rate=0.1)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), PARAMS)
    optimizer = make_optimizer(config, UNITS, PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = optimizer.update(zeros, 1.0, optimizer.init(params), params, 0)
    expected = 0.0 if name == "adam" else -0.1 * 0.5
    np.testing.assert_allclose(new["a"]["kernel"], 1 + expected, atol=1e-6)
    np.testing.assert_allclose(new["b"]["scale"], 1.0, atol=1e-6)


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
    for step in range(3):
        gradient = jax.tree.map(lambda p: random.normal(size=p.shape).astype("f4"), params)
        updates, reference = theirs.update(gradient, reference, params)
        expected = optax.apply_updates(params, updates)
        params, state = ours.update(gradient, 1.0, state, params, step)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)


LAYERS = {
    "layers": {"kernel": jax.ShapeDtypeStruct((3, 32, 4, 64), "float32")}
    | {"scale": jax.ShapeDtypeStruct((3, 32), "float32")},
    "table": jax.ShapeDtypeStruct((64, 32), "float32"),
}
AXES = {
    "layers/kernel": ("layers", "embed", "heads", "head_dim"),
    "layers/scale": ("layers", None),
    "table": ("vocab", "embed"),
}


def some(tree, seed: int):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), tree)


def updated(params, axes, steps=3, **values):
    """Parameters after updates by gradients that are the same for the same paths."""
    optimizer = make_optimizer(optimizer_config(no_decay=(), warmup=0, **values), UNITS, params,
                               axes=axes)  # fmt: skip
    params = some(params, 0)
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.update(some(params, step + 1), 1.0, state, params, step)
    return params, state, optimizer


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd", "adafactor"])
def test_streamed_updates_are_those_of_whole_arrays(name, moments):
    values = {"name": name, "moments": moments}
    whole, state, _ = updated(LAYERS, AXES, **values)
    streamed, in_parts, optimizer = updated(LAYERS, AXES, placement="host", **values)
    close = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        np.float32(a), np.float32(b), rtol=1e-5, atol=1e-6 if moments == "float32" else 1e-3
    )
    jax.tree.map(close, whole, streamed)
    assert jax.tree.structure(state) == jax.tree.structure(in_parts)
    large = {p for p, leaf in flatten(in_parts).items() if leaf.ndim > 1 and leaf.size > 96}
    there = {path for path, flag in flatten(optimizer.on_host(in_parts)).items() if flag}
    assert there == (large if name != "adafactor" else {"0/v/table", "0/v/layers/kernel"})
    assert all(flatten(in_parts)[p].dtype == moments for p in there)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_stacked_layer_is_updated_as_one_that_is_not(name):
    stacked, _, _ = updated(LAYERS, AXES, steps=1, name=name, clip_norm=0.0)
    first = {"layers": {"kernel": jax.ShapeDtypeStruct((1, 32, 4, 64), "float32")}}
    first["layers"]["scale"] = jax.ShapeDtypeStruct((1, 32), "float32")
    optimizer = make_optimizer(
        optimizer_config(no_decay=(), warmup=0, name=name, clip_norm=0.0), UNITS, first, axes=AXES
    )
    layer = lambda tree: jax.tree.map(lambda x: x[:1], {"layers": tree["layers"]})  # noqa: E731
    params, gradient = layer(some(LAYERS, 0)), layer(some(LAYERS, 1))
    alone, _ = optimizer.update(gradient, 1.0, optimizer.init(params), params, 0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), layer(stacked), alone
    )


def test_muon_makes_the_update_of_a_matrix_orthogonal_with_the_size_of_adamw():
    values = {"name": "muon", "weight_decay": 0.0, "learning_rate": 1.0, "schedule": "constant"}
    new, _, _ = updated(LAYERS, AXES, steps=1, **values)
    change = (new["layers"]["kernel"] - some(LAYERS, 0)["layers"]["kernel"]).reshape(3, 32, 256)
    singular = np.linalg.svd(change / (0.2 * 256**0.5), compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert float(jnp.sqrt(jnp.mean(change**2))) == pytest.approx(0.2, rel=0.3)


def test_stochastic_rounding_is_right_in_the_mean():
    x = jnp.asarray(np.random.default_rng(0).normal(size=64), "float32")
    keys = jax.random.split(jax.random.key(0), 4096)
    rounded = jax.vmap(lambda key: round_stochastically(x, key))(keys).astype("float32")
    place = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)  # of the last of 8 bits
    assert (np.abs(rounded - x) < place).all()
    assert (np.abs(np.asarray(rounded).mean(0) - x) < 5 * 0.5 * place / 4096**0.5).all()
    special = jnp.asarray([1.0, 0.0, jnp.inf, jnp.nan])
    rounded = round_stochastically(special, keys[0]).astype("float32")
    np.testing.assert_array_equal(rounded, special)


def test_small_updates_of_bfloat16_parameters_are_not_lost():
    """A hundred updates of 1e-4 of a parameter of 1, whose last place is 8e-3."""
    params = {"kernel": jax.ShapeDtypeStruct((256, 16), "bfloat16")}
    moved = {}
    for rounding in ("nearest", "stochastic", "master"):
        config = optimizer_config(name="lion", beta1=0.0, learning_rate=1e-4, warmup=0, no_decay=(),
                                  schedule="constant", weight_decay=0.0, rounding=rounding)  # fmt: skip
        optimizer = make_optimizer(config, UNITS, params)
        ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
        values, state = ones, optimizer.init(ones)
        for step in range(100):
            values, state = optimizer.update(ones, 1.0, state, values, step)
        assert values["kernel"].dtype == jnp.bfloat16
        moved[rounding] = float(1 - values["kernel"].astype("float32").mean())
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(0.01, rel=0.1)
    assert moved["master"] == pytest.approx(0.01, rel=0.3)  # shown to 8 bits


def test_no_two_parameters_share_the_noise_of_their_rounding():
    """Six stacks of layers are updated in two loops; all their values and updates are equal."""
    names = [f"kernel{i}" for i in range(6)]
    params = {name: jax.ShapeDtypeStruct((2, 64, 64), "bfloat16") for name in names}
    axes = dict.fromkeys(names, ("layers", "embed", "mlp"))
    config = optimizer_config(name="lion", beta1=0.0, learning_rate=2e-3, warmup=0, no_decay=(),
                              schedule="constant", weight_decay=0.0, rounding="stochastic")  # fmt: skip
    optimizer = make_optimizer(config, UNITS, params, axes=axes)
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
    values, _ = optimizer.update(ones, 1.0, optimizer.init(ones), ones, 0)
    layers = [np.asarray(values[name][i], "float32") for name in names for i in range(2)]
    for first in range(len(layers)):
        for second in range(first):
            assert (layers[first] != layers[second]).mean() > 0.2
