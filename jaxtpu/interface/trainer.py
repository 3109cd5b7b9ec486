"""`jaxtpu.Trainer`: a model of one's own, trained on a mesh with the calls that Keras users know."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.config import CheckpointConfig, OptimizerConfig, ShardingConfig
from jaxtpu.errors import ConfigError, UserError
from jaxtpu.interface.adapt import adapt, divide
from jaxtpu.interface.batches import OnMesh, passes, split
from jaxtpu.interface.choices import made_optimizer, optimizer_config, sizes_of
from jaxtpu.interface.feed import Feed, Means
from jaxtpu.interface.losses import ValueFunction, values_by_name
from jaxtpu.mesh import make_mesh
from jaxtpu.observe import console as screen
from jaxtpu.observe.memory import tree_bytes_per_device
from jaxtpu.optimizer import Optimizer
from jaxtpu.sharding import make_rules, row_parts
from jaxtpu.train.evaluate import evaluate
from jaxtpu.train.loop import Progress, StopRequest, train_loop
from jaxtpu.train.programs import Programs, jitted
from jaxtpu.train.step import make_gradient, make_init, make_train_step
from jaxtpu.train.task import MODEL_STATE, weighted_sums

_IN_FLIGHT = 4  # steps handed to the devices ahead of the last one known to be finished

Callback = Callable[[int, dict[str, float]], Any]


class Trainer:
    """Trains a Flax module, NNX or Linen, on all devices.

    Parameters are divided over `fsdp`: by the names of their axes, where each `nnx.Param` has
    `axes`, otherwise along the largest dimension that divides. Batches are divided over `data` and
    `fsdp`; what does not divide is filled up with rows that count for nothing.

    Args:
      model: an NNX module, whose parameters training starts from (it is not changed), or a Linen
        module. Called as `model(inputs)`, and told whether it is training by `train`, `training` or
        `deterministic`, if it has such an argument, and by `module.train()` and `.eval()`.
      mesh: devices along each axis, "data=2,fsdp=4"; one may be -1, for those that are left. By
        default all devices are replicas.
      optimizer: "adam", "adamw", "sgd", "lion", "adafactor" (constant learning rate, no clipping),
        an `OptimizerConfig`, or an optax transformation.
      loss: a Keras name (outputs are logits), or a function (targets, outputs) -> a value for each
        example, [B] or [B, ...].
      metrics: likewise.
      learning_rate: of an optimizer given by name.
      seed: of a Linen module's parameters, and of dropout in one.
      verbose: whether the table at the start and a line for each epoch are printed.

    Raises:
      ConfigError: an argument that cannot work; says what would.
    """

    def __init__(
        self,
        model: Any,
        mesh: str | dict[str, int] = "data=-1",
        optimizer: str | OptimizerConfig | optax.GradientTransformation = "adam",
        loss: str | ValueFunction = "sparse_categorical_crossentropy",
        metrics: Sequence[str | ValueFunction] = (),
        *,
        learning_rate: float = 1e-3,
        seed: int = 0,
        verbose: bool = True,
    ):
        if jax.process_count() > 1:
            raise UserError("Trainer runs in one process; run.py trains in several.")
        self._module, self._seed, self._verbose = model, seed, verbose
        self._values = values_by_name(loss, metrics)
        self._optimizer = optimizer_config(optimizer, learning_rate)
        self._rules = make_rules(ShardingConfig(), make_mesh(sizes_of(mesh)))
        self._on_mesh = OnMesh(self._rules)
        self._programs: Programs | None = None
        self._state: Any = None
        self._step = 0
        self._out = screen.make_console()

    @property
    def params(self) -> Any:
        """The parameters, a nested dict of arrays on the mesh."""
        return self._built().params

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    def build(self, inputs: Any = None) -> "Trainer":
        """Makes the state and the functions of the steps; `fit` does it with its first batch.

        Args:
          inputs: an example of a batch's inputs, which a Linen module needs.
        """
        if self._programs is not None:
            return self
        if inputs is None and not hasattr(self._module, "train"):
            raise ConfigError("model", type(self._module).__name__, "has no parameters before it "
                              "has seen a batch.", "Call trainer.build(inputs) first.")  # fmt: skip
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        model, params, kept = adapt(self._module, shapes, self._seed)
        shardings, undivided, words = divide(model, self._rules)
        optimizer = made_optimizer(self._optimizer, model.abstract_params, row_parts(shardings))
        init = make_init(model, optimizer, self._seed)
        sums = {training: self._sums(model, training) for training in (True, False)}
        gradient_of = make_gradient(model.cast, sums[True], shardings, 1, jnp.float32)
        step = make_train_step(gradient_of, optimizer)
        self._programs = jitted(
            model, self._rules, optimizer, shardings, init, gradient_of, step,
            sums[False], abstract_batch=None, undivided=undivided,
        )  # fmt: skip
        self._state = self._initial_state(params, kept, optimizer)
        self._predict = jax.jit(
            lambda params, kept, x: model.apply_to(params, kept, x, training=False)[0]
        )
        if self._verbose:
            screen.table(self._out, "jaxtpu.Trainer", self._rows(words))
        return self

    def _initial_state(self, params: Any, kept: Any, optimizer: Optimizer) -> Any:
        """The module's own arrays on the mesh: they are no constants of a program. They are copied,
        for the step takes the place of what it is given, and the module is not ours."""
        abstract = self._programs.abstract_state
        place = lambda tree, like: jax.tree.map(  # noqa: E731
            lambda x, a: jax.device_put(jnp.copy(x), a.sharding), tree, like
        )
        placed = place(params, abstract.params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract.opt_state)
        opt_state = jax.jit(optimizer.init, out_shardings=shardings)(placed)
        return abstract.replace(
            step=jax.device_put(jnp.int32(0), abstract.step.sharding),
            params=placed,
            opt_state=opt_state,
            model_state=place(kept, abstract.model_state),
        )

    def _sums(self, model: Any, training: bool):
        def batch_sums(params, batch, state=None):
            with self._rules.active():
                outputs, state = model.apply_to(params, state, batch["inputs"], training=training)
                sums = weighted_sums(self._values, outputs, batch)
            return sums if state is None else sums | {MODEL_STATE: state}

        return batch_sums

    def _rows(self, words: str) -> list[tuple[str, str]]:
        mesh, params = self._rules.mesh, self._state.params
        device = mesh.devices.flat[0]
        kind = "emulated on the CPU" if device.platform == "cpu" else device.device_kind
        total = sum(leaf.size for leaf in jax.tree.leaves(params))
        return [
            ("devices", f"{mesh.size} ({kind})"),
            ("mesh", " x ".join(f"{axis}={n}" for axis, n in mesh.shape.items())),
            ("model", type(self._module).__name__),
            (
                "parameters",
                f"{screen.count(total)}; {screen.size(tree_bytes_per_device(params))} a device, "
                f"optimizer {screen.size(tree_bytes_per_device(self._state.opt_state))}",
            ),
            ("sharding", words),
            *[("not divided", str(note)) for note in self._programs.undivided],
        ]

    def fit(
        self,
        dataset: Any,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, list[float]]:
        """Trains, going on from where the last call ended.

        Args:
          dataset: a `tf.data.Dataset`, or any iterable of (inputs, labels) or (inputs, labels,
            weights), or a function that returns one; inputs may be a dict of arrays. It is read in
            a thread, ahead of the step.
          epochs: how many.
          steps_per_epoch: batches called an epoch, which go on from one epoch to the next, from
            the start where the data end; None takes a whole pass.
          validation_data: evaluated after each epoch, its results are called `val_...`.
          callbacks: called as (epoch, logs) after each, from 0; a true result ends the training.

        Returns:
          `loss`, the metrics and their `val_...`, a list with a number for each epoch.
        """
        history: dict[str, list[float]] = {}
        with contextlib.closing(Feed(dataset, self._placed)) as feed:
            for epoch in range(epochs):
                start = time.perf_counter()
                logs = self._run_epoch(feed, epoch, steps_per_epoch)
                if validation_data is not None:
                    held_out = self.evaluate(validation_data)
                    logs |= {f"val_{k}": v for k, v in held_out.items() if k != "examples"}
                for name, value in logs.items():
                    history.setdefault(name, []).append(value)
                if self._verbose:
                    words = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
                    seconds = time.perf_counter() - start
                    self._out.print(f"epoch {epoch + 1}/{epochs}  {words}  ({seconds:.1f} s)")
                if any([callback(epoch, logs) for callback in callbacks]):
                    break
        return history

    def _run_epoch(self, feed: Feed, epoch: int, steps: int | None) -> dict[str, float]:
        means = Means()
        batches = feed.epoch(steps)
        first = next(batches, None)
        if first is None:
            hint = "Give a list, a tf.data.Dataset, or a function that returns a new generator."
            raise ConfigError("dataset", f"epoch {epoch + 1}", "there is no batch left.", hint)

        def keep(progress: Progress) -> None:
            self._state, self._step = progress.state, progress.step
            means.add(progress)

        train_loop(
            self._programs.train_step,
            self._built(),
            itertools.chain([first], batches),
            start=self._step,
            steps=sys.maxsize,
            max_in_flight=_IN_FLIGHT,
            hooks=[keep],
            stop=StopRequest(),
            clock=means.clock,
        )
        return means.result()

    def _placed(self, batch: tuple) -> dict[str, Any]:
        self.build(batch[0])
        return self._on_mesh(batch)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """`loss` and the metrics, exact means over all examples, and `examples`, their number."""
        with contextlib.closing(Feed(dataset, self._placed)) as feed:
            batches = (batch for batch, _ in feed.epoch(None))
            first = next(batches, None)
            if first is None:
                raise ConfigError("dataset", "", "gave no batch.", "Give at least one.")
            return evaluate(
                self._programs.eval_step,
                self._built().evaluated(),
                itertools.chain([first], batches),
                _IN_FLIGHT,
            )

    def predict(self, inputs: Any, batch_size: int = 128) -> Any:
        """The model's outputs, as NumPy arrays, one row for each example.

        Args:
          inputs: an array, a dict of arrays, or a dataset of batches, whose labels are not read.
          batch_size: examples at a time, of arrays.
        """
        if isinstance(inputs, (np.ndarray, jax.Array, dict)):
            count = len(jax.tree.leaves(inputs)[0])
            inputs = [
                jax.tree.map(lambda x, i=i: np.asarray(x[i : i + batch_size]), inputs)
                for i in range(0, count, batch_size)
            ]
        results = []
        for batch in next(passes(inputs)):
            arrays, _, _ = split(batch, labelled=False)
            self.build(arrays)
            count = len(jax.tree.leaves(arrays)[0])
            placed = self._on_mesh((arrays, None, None))["inputs"]
            outputs = self._predict(self._state.params, self._state.model_state, placed)
            results.append(jax.tree.map(lambda x, n=count: np.asarray(x)[:n], outputs))
        if not results:
            raise ConfigError("inputs", "", "gave no batch.", "Give at least one.")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results)

    def save(self, path: str) -> None:
        """Writes the state, whole, into a folder; a later one of more steps stands beside it."""
        with contextlib.closing(Checkpoints(path, CheckpointConfig())) as checkpoints:
            checkpoints.save(self._step, self._built(), {"step": self._step}, None)
            checkpoints.wait()

    def load(self, path: str) -> "Trainer":
        """Takes the latest state that `save` wrote, also on another mesh.

        Raises:
          ConfigError: there is none.
        """
        self.build()
        with contextlib.closing(Checkpoints(path, CheckpointConfig())) as checkpoints:
            if checkpoints.latest_step is None:
                raise ConfigError("path", path, "holds no saved state.", "Call save(path) first.")
            self._state, position = checkpoints.restore(self._programs.abstract_state)
        self._step = position["step"]
        return self

    def _built(self) -> Any:
        if self._state is None:
            self.build()
        return self._state
