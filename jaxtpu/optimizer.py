"""The optimizer: an optax chain from the config."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtpu.config import OptimizerConfig, RunUnits, to_steps
from jaxtpu.errors import ConfigError
from jaxtpu.paths import flatten, map_with_path, matcher


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer whose gradients are weighted by real tokens.

    Attributes:
      init: params -> state.
      update: (mean gradient, tokens it is the mean over, state, params) -> (updates, state).
      learning_rate: step -> learning rate.
    """

    init: Any
    update: Any
    learning_rate: optax.Schedule


def make_optimizer(config: OptimizerConfig, units: RunUnits, abstract_params: Any) -> Optimizer:
    """Clipping, the optimizer, weight decay, the schedule; accumulation around them.

    Raises:
      ConfigError: a pattern of `no_decay` that matches no parameter; durations that do not fit.
    """
    every = config.accumulate_steps
    schedule = make_schedule(config, units)
    # Switched off, a part is still there: the state keeps its structure, and a run can resume.
    clip = [optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()]
    chain = optax.chain(*clip, *_transformations(config, schedule, abstract_params))
    if every == 1:
        update = lambda gradient, tokens, state, params: chain.update(gradient, state, params)  # noqa: E731
        return Optimizer(chain.init, update, schedule)
    return _accumulated(chain, every, lambda step: schedule(step // every))


def make_schedule(config: OptimizerConfig, units: RunUnits) -> optax.Schedule:
    """Update -> learning rate: linear warm-up, then the schedule of that name.

    An update is a step, or `accumulate_steps` of them; durations are of the run all the same.

    Raises:
      ConfigError: the warm-up and the decay do not fit into the run; what fits is told in steps.
    """
    every, peak = config.accumulate_steps, config.learning_rate
    total = max(1, units.steps // every)
    warmup = to_steps("optimizer.warmup", config.warmup, units) // every
    decay = to_steps("optimizer.decay", config.decay, units) // every
    decay = decay if config.schedule == "wsd" else 0
    if decay > total:
        raise ConfigError(
            "optimizer.decay", config.decay, f"the decay of {decay} updates is longer than the run, "
            f"which has {total}.", f"Use at most {total * every}.",
        )  # fmt: skip
    if warmup + decay > total or (warmup == total and total > 1):
        raise ConfigError(
            "optimizer.warmup", config.warmup,
            f"warm-up {warmup} and decay {decay} do not fit into {total} updates.",
            f"Use at most {(total - max(decay, 1)) * every}.",
        )  # fmt: skip
    rest = max(1, total - warmup)
    last, first = peak * config.final_fraction, max(1, warmup)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, last, rest),
        "constant": lambda: optax.constant_schedule(peak),
        "rsqrt": lambda: lambda count: peak * jnp.sqrt(first / jnp.maximum(count + first, first)),
        "wsd": lambda: optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, last, max(1, decay))],
            [rest - decay],
        ),
    }[config.schedule]()
    if not warmup:
        return after
    # The first update is made at 1/warmup of the peak: an update at 0 would be a step thrown away.
    rise = lambda count: peak * (count + 1) / warmup  # noqa: E731
    return optax.join_schedules([rise, after], [warmup])


def _transformations(config: OptimizerConfig, schedule: optax.Schedule, params: Any) -> list:
    decay = config.weight_decay if config.name != "adam" else 0.0
    no_decay = matcher("optimizer.no_decay", config.no_decay, flatten(params))
    mask = map_with_path(lambda path, _: not no_decay(path), params)
    scale = {
        "adamw": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        "adam": lambda: optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        "adafactor": lambda: optax.scale_by_factored_rms(),
        "lion": lambda: optax.scale_by_lion(config.beta1, config.beta2),
        "sgd": lambda: optax.trace(config.beta1) if config.beta1 else optax.identity(),
    }[config.name]()
    # Adafactor's own step size: no update is larger than 1 in root mean square (arXiv:1804.04235).
    limit = [optax.clip_by_block_rms(1.0)] if config.name == "adafactor" else []
    shrink = optax.add_decayed_weights(decay, mask)
    return [scale, *limit, shrink, optax.scale_by_learning_rate(schedule)]


def _accumulated(chain: optax.GradientTransformation, every: int, learning_rate) -> Optimizer:
    """`optax.MultiSteps` averages what it is given; given the token-weighted gradient and the
    number of tokens, the quotient of the two averages is the mean over all tokens."""

    def quotient(tree, state, params):
        gradient = jax.tree.map(lambda g: g / jnp.maximum(tree["tokens"], 1e-9), tree["gradient"])
        updates, state = chain.update(gradient, state, params["gradient"])
        return {"gradient": updates, "tokens": jnp.zeros_like(tree["tokens"])}, state

    inner = optax.GradientTransformation(lambda tree: chain.init(tree["gradient"]), quotient)
    multi = optax.MultiSteps(inner, every)

    def with_tokens(tree, tokens):
        return {"gradient": tree, "tokens": jnp.asarray(tokens, jnp.float32)}

    def update(gradient, tokens, state, params):
        weighted = jax.tree.map(lambda g: g * tokens, gradient)
        updates, state = multi.update(
            with_tokens(weighted, tokens), state, with_tokens(params, 0.0)
        )
        return updates["gradient"], state

    return Optimizer(lambda params: multi.init(with_tokens(params, 0.0)), update, learning_rate)
