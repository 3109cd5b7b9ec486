"""The step: one pure function that the loop runs, the planner compiles and the tests compare."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxtpu.kernels.chunked_loss import token_sums
from jaxtpu.kernels.cross_entropy import cross_entropy
from jaxtpu.models import Model
from jaxtpu.optimizer import Optimizer
from jaxtpu.sharding import Rules

LOSSES = {"cross_entropy": cross_entropy}
METRICS = {
    "accuracy": lambda logits, targets: jnp.argmax(logits, axis=-1) == targets,
}


@flax.struct.dataclass
class TrainState:
    """All that a step changes.

    Attributes:
      step: steps done, int32 scalar.
      params: nested dict of parameters.
      opt_state: optax state.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def make_init(model: Model, optimizer: Optimizer, seed: int):
    """() -> the state before the first step. The seed alone decides it, whatever the mesh."""

    def init() -> TrainState:
        params = model.init(jax.random.key(seed))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return init


@dataclasses.dataclass(frozen=True)
class PerToken:
    """(logits [..., V], targets [...]) -> the value of each token, float32 [...], by name.

    Attributes:
      loss: name in `LOSSES`; the value is called `loss`.
      metrics: names in `METRICS`.
      options: keyword arguments of the loss, as pairs.
    """

    loss: str
    metrics: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, logits: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        values = {name: METRICS[name](logits, targets) for name in self.metrics}
        return {"loss": LOSSES[self.loss](logits, targets, **dict(self.options))} | values


def make_batch_sums(model: Model, rules: Rules, per_token: PerToken, chunk: int):
    """(params, batch) -> sums over the real tokens of a batch: `loss`, each metric, `tokens`.

    Args:
      per_token: what is summed.
      chunk: tokens of a device whose logits are held at a time; 0 for automatic.
    """

    def batch_sums(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        weights_BT = batch["weights"]
        with rules.active():
            x_BTE, head_EV = model.features_and_head(params, batch)
            # As a part of the model: reports leave out the outermost name.
            with jax.named_scope("model/loss"):
                sums = token_sums(
                    per_token, x_BTE, head_EV, batch["targets"], weights_BT,
                    vocab_size=model.vocab_size, chunk=chunk,
                )  # fmt: skip
        return sums | {"tokens": jnp.sum(weights_BT)}

    return batch_sums


def in_microbatches(fun, microbatches: int):
    """`fun(params, batch, ...)`, whose results are sums, run on equal parts of the batch in turn."""
    if microbatches == 1:
        return fun

    def summed(params: Any, batch: dict[str, jax.Array], *rest):
        rows = batch["inputs"].shape[0] // microbatches
        return optax.microbatching.microbatch(fun, 1, rows)(params, batch, *rest)

    return summed


def on_each_replica(fun, replicas: int):
    """`fun(params, batch, ...)`, whose results are sums, run on the part of the batch that each
    index of the mesh axis `data` has; what they give is added up once, at the end."""
    if replicas == 1:
        return fun

    def summed(params: Any, batch: dict[str, jax.Array], *rest):
        batch = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), batch)
        in_axes = (None, 0, *(None for _ in rest))
        results = jax.vmap(fun, in_axes, spmd_axis_name="data")(params, batch, *rest)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), results)

    return summed


def make_train_step(
    cast,
    batch_sums,
    optimizer: Optimizer,
    param_shardings: Any,
    microbatches: int,
    accumulate: jnp.dtype,
    replicas: int = 1,
):
    """The function (state, batch) -> (state, metrics).

    The loss is the mean over the real tokens of the whole batch, so k microbatches of any padding
    give the update of one large batch. `metrics` are float32 scalars on the devices: the means,
    `tokens`, `grad_norm`, `learning_rate`.

    Args:
      cast: the parameters as gradients are taken with respect to (`Model.cast`).
      batch_sums: from `make_batch_sums`.
      param_shardings: gradients are kept divided as the parameters are.
      microbatches: parts of the batch that are run one after the other.
      accumulate: dtype of the gradients summed over microbatches.
      replicas: parts of the batch that keep their own sums over microbatches: one reduction over
        the mesh axis `data` a step, not one a microbatch. `batch_sums` is then of rules that are
        `mapped_over("data")`.
    """

    def gradient_and_sums(params, batch, tokens):
        def mean_loss(params):
            sums = batch_sums(params, batch)
            return sums["loss"] / tokens, sums

        gradient, sums = jax.grad(mean_loss, has_aux=True)(cast(params))
        if microbatches > 1:  # one gradient is not summed: the update widens it part by part
            gradient = jax.tree.map(lambda g: g.astype(accumulate), gradient)
        return jax.lax.with_sharding_constraint(gradient, param_shardings), sums

    def train_step(state: TrainState, batch: dict[str, jax.Array]):
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        summed = on_each_replica(in_microbatches(gradient_and_sums, microbatches), replicas)
        gradient, sums = summed(state.params, batch, tokens)
        params, opt_state = optimizer.update(
            gradient, tokens, state.opt_state, state.params, state.step
        )
        metrics = {name: total / tokens for name, total in sums.items() if name != "tokens"}
        metrics |= {
            "tokens": sums["tokens"],
            "grad_norm": optax.tree.norm(gradient),
            "learning_rate": jnp.asarray(optimizer.learning_rate(state.step), jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
