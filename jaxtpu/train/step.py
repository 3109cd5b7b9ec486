"""The step: one pure function that the loop runs, the planner compiles and the tests compare."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxtpu.config import GuardConfig
from jaxtpu.models import Model
from jaxtpu.optimizer import Optimizer, chosen
from jaxtpu.train.guard import Guard, judge, new_guard
from jaxtpu.train.task import MODEL_STATE, count_name


@flax.struct.dataclass
class TrainState:
    """All that a step changes.

    Attributes:
      step: steps done, int32 scalar.
      params: nested dict of parameters.
      opt_state: optax state.
      model_state: what a model keeps besides parameters, such as running averages of batch
        statistics; None for a model without any.
      average: running average of the parameters (`optimizer.average`); None without one.
      guard: what the guard against numbers that go wrong remembers; None without one.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any = None
    average: Any = None
    guard: Guard | None = None

    def evaluated(self) -> Any:
        """What evaluation is run with: the parameters, or their average; beside the model's own
        state, where it has any, in a pair."""
        params = self.params if self.average is None else self.average
        return params if self.model_state is None else (params, self.model_state)


def make_init(
    model: Model, optimizer: Optimizer, seed: int, average: bool = False, guarded: bool = False
):
    """() -> the state before the first step: the seed alone decides it, whatever the mesh. Or
    (parameters) -> that state with those.

    Args:
      average: whether a running average of the parameters is kept.
      guarded: whether the step has a guard.
    """

    def init(params: Any = None) -> TrainState:
        params = model.init(jax.random.key(seed)) if params is None else params
        kept = jax.tree.map(lambda p: p.astype(jnp.float32), params) if average else None
        guard = new_guard() if guarded else None
        zero, opt_state = jnp.zeros((), jnp.int32), optimizer.init(params)
        return TrainState(zero, params, opt_state, model.init_state(), kept, guard)

    return init


def average_with(average: Any, params: Any, decay: float, step: jax.Array) -> Any:
    """The running average after a step, in float32; None stays None.

    Early on the decay is (1 + step) / (10 + step) where that is less, so that the initial
    parameters are soon forgotten (as TensorFlow's `ExponentialMovingAverage` does with `num_updates`).
    """
    if average is None:
        return None
    now = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda a, p: now * a + (1 - now) * p.astype(a.dtype), average, params)


def in_microbatches(fun, microbatches: int):
    """`fun(params, batch, ...)`, whose results are sums, run on equal parts of the batch in turn."""
    if microbatches == 1:
        return fun

    def summed(params: Any, batch: dict[str, jax.Array], *rest):
        rows = batch["weights"].shape[0] // microbatches
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


def make_gradient(
    cast,
    batch_sums,
    param_shardings: Any,
    microbatches: int,
    accumulate: jnp.dtype,
    replicas: int = 1,
):
    """The function (params, batch, model_state) -> (gradient, tokens, sums).

    The gradient is of the mean loss over the real tokens of the whole batch, so k microbatches of
    any padding give that of one large batch. A model's own state, in `sums`, is taken from the
    batch as `batch_sums` gives it; of several microbatches it is the mean.

    Args:
      cast: the parameters as gradients are taken with respect to (`Model.cast`).
      batch_sums: of a `Task`.
      param_shardings: gradients are kept divided as the parameters are.
      microbatches: parts of the batch that are run one after the other.
      accumulate: dtype of the gradients summed over microbatches.
      replicas: parts of the batch that keep their own sums over microbatches: one reduction over
        the mesh axis `data` a step, not one a microbatch. `batch_sums` is then of rules that are
        `mapped_over("data")`.
    """

    def gradient_and_sums(params, batch, tokens, *model_state):
        def mean_loss(params):
            sums = batch_sums(params, batch, *model_state)
            return sums["loss"] / tokens, sums

        gradient, sums = jax.grad(mean_loss, has_aux=True)(cast(params))
        if microbatches > 1:  # one gradient is not summed: the update widens it part by part
            gradient = jax.tree.map(lambda g: g.astype(accumulate), gradient)
        return jax.lax.with_sharding_constraint(gradient, param_shardings), sums

    def gradient_of(params: Any, batch: dict[str, jax.Array], model_state: Any = None):
        tokens = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
        summed = on_each_replica(in_microbatches(gradient_and_sums, microbatches), replicas)
        kept = () if model_state is None else (model_state,)
        gradient, sums = summed(params, batch, tokens, *kept)
        if microbatches > 1 and MODEL_STATE in sums:
            mean = jax.tree.map(lambda x: x / microbatches, sums[MODEL_STATE])
            sums = sums | {MODEL_STATE: mean}
        return gradient, tokens, sums

    return gradient_of


def make_train_step(
    gradient_of, optimizer: Optimizer, average: float = 0.0, guard: GuardConfig | None = None
):
    """The function (state, batch) -> (state, metrics).

    `metrics` are float32 scalars on the devices: the means, how many they are over (`tokens`, or
    what else the task counts), `grad_norm`, `learning_rate`; with a guard also `dropped`, the
    updates dropped in a row up to this step.

    Args:
      gradient_of: of `make_gradient`.
      average: decay of the running average of the parameters, a step; 0 for none.
      guard: what it does with numbers that go wrong; None: nothing.
    """

    def train_step(state: TrainState, batch: dict[str, jax.Array]):
        gradient, tokens, sums = gradient_of(state.params, batch, state.model_state)
        sums = dict(sums)
        model_state = sums.pop(MODEL_STATE, None)
        count = count_name(sums)
        metrics = {name: total / tokens for name, total in sums.items() if name != count}
        norm = optax.tree.norm(gradient)
        metrics |= {
            count: sums[count],
            "grad_norm": norm,
            "learning_rate": jnp.asarray(optimizer.learning_rate(state.step), jnp.float32),
        }
        verdict = judge(guard, state.guard, metrics["loss"], norm) if guard else None
        params, opt_state = optimizer.update(
            gradient, tokens, state.opt_state, state.params, state.step, verdict
        )
        averaged = average_with(state.average, params, average, state.step)
        if verdict is None:
            return TrainState(state.step + 1, params, opt_state, model_state, averaged), metrics
        kept = chosen(verdict.update, (model_state, averaged), (state.model_state, state.average))
        step = state.step + verdict.advance
        metrics["dropped"] = verdict.guard.in_row.astype(jnp.float32)
        return TrainState(step, params, opt_state, *kept, verdict.guard), metrics

    return train_step
