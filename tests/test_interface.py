"""`jaxtpu.Trainer` with models of one's own: meshes, odd sizes, data, losses, errors."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jaxtpu
from jaxtpu.errors import ConfigError

ROWS = 37  # no multiple of anything


class Net(nnx.Module):
    """Odd sizes, a norm with running averages, and dropout, without a name for any axis."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.first = nnx.Linear(6, 24, rngs=rngs)
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(6, 24, rngs=rngs)
        self.last = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(16)(x))
        return linen.Dense(3)(linen.Dropout(0.1, deterministic=not train)(x))


def examples(seed: int = 0, rows: int = ROWS):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype(np.float32)
    return x, np.argmax(x[:, :3], axis=1)


def batches(size: int = 8, **options):
    x, y = examples(**options)
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def trainer(model=None, **options):
    model = Plain(nnx.Rngs(0)) if model is None else model
    return jaxtpu.Trainer(model, **{"mesh": "data=2,fsdp=4", "verbose": False} | options)


@pytest.fixture(scope="module")
def trained():
    """A fitted trainer with its history."""
    made = trainer(metrics=["accuracy"], learning_rate=0.02)
    return made, made.fit(batches(), epochs=12, validation_data=batches(seed=1))


def test_it_learns_and_gives_the_history(trained):
    made, history = trained
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert len(history["loss"]) == 12 and history["loss"][-1] < 0.5 * history["loss"][0]
    assert made.step == 12 * 5


def test_evaluation_is_exact_with_a_last_batch_that_does_not_divide(trained):
    made, _ = trained
    x, y = examples(seed=1)
    logits = made.predict(x)
    assert logits.shape == (ROWS, 3)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    result = made.evaluate(batches(seed=1))
    assert result["examples"] == ROWS
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float((logits.argmax(-1) == y).mean()), rel=1e-6)
    assert made.evaluate(batches(size=6, seed=1))["loss"] == pytest.approx(result["loss"], rel=1e-5)
    np.testing.assert_allclose(made.predict(batches(size=5, seed=1)), logits, rtol=1e-5, atol=1e-6)


def test_parameters_are_divided_along_their_largest_dimension(trained):
    made, _ = trained
    assert made.params["first"]["kernel"].sharding.spec == P(None, "fsdp")
    assert made.params["last"]["kernel"].sharding.spec == P("fsdp", None)
    assert made.params["last"]["bias"].sharding.is_fully_replicated


def test_the_table_says_how_they_are_divided(capsys):
    trainer(verbose=True).fit(batches()[:1])
    printed = capsys.readouterr().out
    assert "by shape" in printed and "3 of 4 parameters" in printed and "last/bias (3,)" in printed
    assert "epoch 1/1  loss" in printed


def test_a_mesh_trains_as_one_step_of_optax_by_hand():
    model = Plain(nnx.Rngs(1))
    graph, params = nnx.split(model)
    x, y = examples(rows=6)

    def loss(params):
        logits = nnx.merge(graph, params)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    made = trainer(model, optimizer=optax.sgd(0.1))  # 6 rows on 8 devices
    made.fit([(x, y)])
    for a, b in zip(jax.tree.leaves(made.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert not np.allclose(made.params["first"]["kernel"], params["first"]["kernel"][...])


def test_batch_statistics_and_dropout_are_kept_and_saved(tmp_path):
    made = trainer(Net(nnx.Rngs(0), rate=0.1), optimizer="adamw")
    made.fit(batches(), epochs=2)
    x, _ = examples()
    before = made.predict(x)
    np.testing.assert_array_equal(before, made.predict(x))  # no dropout
    made.save(str(tmp_path))
    again = trainer(Net(nnx.Rngs(5), rate=0.1), optimizer="adamw", mesh="fsdp=8").load(
        str(tmp_path)
    )
    np.testing.assert_allclose(again.predict(x), before, atol=1e-5)
    assert again.step == made.step


def test_a_linen_module_trains():
    made = trainer(LinenNet(), learning_rate=0.02, metrics=["accuracy"])
    history = made.fit(batches, epochs=8)  # a function that returns an iterable
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert set(made.predict(examples()[0]).shape) == {ROWS, 3}


def test_losses_metrics_and_callbacks_are_plain_functions():
    def margin(targets, outputs):
        return jnp.sum((outputs - jax.nn.one_hot(targets, 3)) ** 2, axis=-1)

    def constant(targets, outputs):
        return jnp.full(len(outputs), 2.0)

    seen = []
    made = trainer(loss=margin, metrics=[constant, "top_5_accuracy"])
    history = made.fit(
        batches(), epochs=5, callbacks=[lambda epoch, logs: seen.append(logs) or epoch == 1]
    )
    assert len(seen) == 2 and len(history["loss"]) == 2
    assert history["constant"] == pytest.approx([2.0, 2.0])
    assert history["top_5_accuracy"] == [1.0, 1.0]


def test_steps_per_epoch_go_through_a_tf_dataset_again_and_again():
    from jaxtpu.data.quiet_tensorflow import import_tensorflow

    data = import_tensorflow().data.Dataset.from_tensor_slices(examples()).batch(8)
    made = trainer()
    made.fit(data, epochs=2, steps_per_epoch=7)
    assert made.step == 14
    assert made.evaluate(data)["examples"] == ROWS


def test_weights_count():
    x, y = examples(rows=8)
    made = trainer()
    weighted = made.evaluate([(x, y, np.r_[np.ones(3), np.zeros(5)])])
    assert weighted["examples"] == 3
    assert weighted["loss"] == pytest.approx(made.evaluate([(x[:3], y[:3])])["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mesh": "data=3,fsdp=4"}, "mesh.fsdp=-1"),
        ({"mesh": "dat=2"}, "data"),
        ({"mesh": "data"}, "data=2"),
        ({"optimizer": "adm"}, "adam"),
        ({"loss": "crossentropy"}, "crossentropy"),
        ({"metrics": ["acuracy"]}, "accuracy"),
        ({"model": lambda x: x}, "nnx.Linear"),
        ({"mesh": "data=4,tensor=2"}, "tensor=1"),
        ({"loss": lambda targets, outputs: jnp.mean(outputs)}, "axis=-1"),
        ({"loss": "mse"}, "sparse_categorical_crossentropy"),
    ],
)
def test_a_wrong_argument_is_told_with_what_works(options, told):
    with pytest.raises(ConfigError) as error:
        trainer(**options).fit(batches())
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "no batch left"),
        ([np.zeros((8, 6))], "(inputs, labels)"),
        ([(np.zeros((8, 6)), np.zeros(7))], "one first dimension"),
        (np.zeros((8, 6)), "list or generator"),
        ([(np.array(["a"]), np.zeros(1))], "ids"),
        ([(np.zeros((0, 6)), np.zeros(0))], "is empty"),
    ],
)
def test_wrong_data_are_told_with_what_works(data, told):
    with pytest.raises(ConfigError) as error:
        trainer().fit(data)
    assert told in str(error.value)


def test_a_generator_that_ends_says_how_to_give_it_again():
    with pytest.raises(ConfigError, match="function that returns"):
        trainer().fit((batch for batch in batches()), epochs=2)


def test_an_error_of_the_data_is_told_with_its_cause():
    def broken():
        yield batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        trainer().fit(broken)


def test_importing_is_light():
    code = "import jaxtpu, sys; assert not {'jax', 'flax', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path):
    readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    example = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.S) if "Trainer(" in b)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path, timeout=600,
        env={"PATH": "", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 20/20" in done.stdout
