"""The optimizer: an optax chain from the config, and how its update is made."""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxtpu.config import OptimizerConfig, RunUnits, to_steps
from jaxtpu.errors import ConfigError
from jaxtpu.layerwise import init_layerwise, make_layout, update_layerwise
from jaxtpu.paths import flatten, map_with_path, matcher
from jaxtpu.precision import round_stochastically

# Root mean square of a muon update, as an AdamW update has it: learning rates and weight decay
# carry over (arXiv:2502.16982, section 2.2).
_MUON_RMS = 0.2


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer whose gradients are weighted by real tokens.

    Attributes:
      init: params -> state.
      update: (mean gradient, tokens it is the mean over, state, params, step, verdict) -> (params,
        state); by a `Verdict` the gradient is scaled, or nothing changes; None for neither.
      learning_rate: step -> learning rate.
      on_host: abstract state -> tree of flags: which of it lives on the host, where it can.
    """

    init: Any
    update: Any
    learning_rate: optax.Schedule
    on_host: Any


class _WithMaster(NamedTuple):
    """State of an optimizer that keeps the parameters in float32."""

    state: Any
    master: Any


class _Accumulated(NamedTuple):
    """Steps since the last update: how many, their tokens, their gradients weighted by tokens."""

    state: Any
    steps: jax.Array
    tokens: jax.Array
    gradient: Any


def make_optimizer(
    config: OptimizerConfig,
    units: RunUnits,
    abstract_params: Any,
    *,
    axes: dict[str, tuple[str | None, ...]] | None = None,
    divided: dict[str, int] | None = None,
    moved: bool = False,
) -> Optimizer:
    """Clipping, the optimizer, weight decay, the schedule; accumulation around them.

    Args:
      axes: logical axes of the parameters by path; without them none is a stack of layers.
      divided: by path, the parts into which the mesh divides the first dimension; 1 without it.
      moved: whether state that `placement=host` puts there is there: a TPU's programs can.

    Raises:
      ConfigError: a pattern of `no_decay` that matches no parameter; durations that do not fit.
    """
    axes, every, schedule = axes or {}, config.accumulate_steps, make_schedule(config, units)
    stacked = [path for path, names in axes.items() if names[:1] == ("layers",)]
    host = config.placement == "host"
    each = config.name not in ("adafactor", "muon")  # the update of an element needs no other
    layout = make_layout(
        abstract_params,
        stacked,
        # Elementwise updates of whole stacks are one pass over memory, without temporaries.
        looped=host or not each or config.rounding == "stochastic",
        host=host,
        # What is not stacked has an elementwise update, but for adafactor, whose state is small.
        cut={}
        if not host or config.name == "adafactor"
        else {
            path: (divided or {}).get(path, 1)
            for path, leaf in flatten(abstract_params).items()
            if path not in stacked and leaf.ndim > 1
        },
    )
    chain = optax.chain(*_transformations(config, schedule, abstract_params, axes, stacked))
    moments = jnp.dtype(config.moments)

    def init(params: Any) -> Any:
        as_moments = jax.tree.map(lambda p: p.astype(moments), params)
        state = init_layerwise(chain.init, as_moments, stacked)
        if config.rounding == "master":
            return _WithMaster(state, jax.tree.map(lambda p: p.astype(jnp.float32), params))
        return state

    def update(gradient, tokens, state, params, step, verdict=None):
        del tokens
        factor = _clip_factor(gradient, config.clip_norm)
        factor = factor if verdict is None else jnp.minimum(factor, verdict.factor)
        made = None if verdict is None else verdict.update
        key = jax.random.fold_in(jax.random.key(0), step)
        part_update = lambda *arguments: _update_part(config, chain, factor, made, key, *arguments)  # noqa: E731
        return update_layerwise(part_update, layout, gradient, state, params, moved)

    on_host = lambda state: layout.on_host(state, abstract_params)  # noqa: E731
    optimizer = Optimizer(init, update, schedule, on_host)
    return optimizer if every == 1 else _accumulated(optimizer, every)


def _clip_factor(gradient: Any, clip_norm: float) -> jax.Array | float:
    """What the gradient is multiplied by, so that its global norm is at most `clip_norm`."""
    if not clip_norm:
        return 1.0
    return jnp.minimum(1.0, clip_norm / jnp.maximum(optax.tree.norm(gradient), 1e-30))


def _update_part(config, chain, factor, made, key, gradient, state, params, part):
    """(params, state) of one part; computed in float32, kept in the dtypes that they had. Where
    `made` is false, they stay what they were."""
    gradient = jax.tree.map(lambda g: g.astype(jnp.float32) * factor, gradient)
    before, old = state if config.rounding == "master" else (state, _float32(params))
    updates, after = chain.update(gradient, _float32(before), old)
    after = jax.tree.map(lambda new, was: new.astype(was.dtype), after, before)
    new = optax.apply_updates(old, updates)
    by_path = flatten(new)

    def kept(path: str, was: jax.Array) -> jax.Array:
        if config.rounding == "stochastic" and was.dtype == jnp.bfloat16:
            of_path = jax.random.fold_in(key, zlib.crc32(path.encode()))  # no two share their noise
            return round_stochastically(by_path[path], jax.random.fold_in(of_path, part))
        return by_path[path].astype(was.dtype)

    new_state = _WithMaster(after, new) if config.rounding == "master" else after
    result = map_with_path(kept, params), new_state
    return chosen(made, result, (params, state))


def chosen(made: jax.Array | None, new: Any, old: Any) -> Any:
    """`new` where an update is made (None: always), otherwise `old`."""
    return new if made is None else jax.tree.map(lambda n, o: jnp.where(made, n, o), new, old)


def _float32(tree: Any) -> Any:
    """`tree` with its bfloat16 leaves in float32."""
    return jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, tree)


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


def _transformations(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    params: Any,
    axes: dict[str, tuple[str | None, ...]],
    stacked: Sequence[str],
) -> list[optax.GradientTransformation]:
    decay = config.weight_decay if config.name != "adam" else 0.0
    no_decay = matcher("optimizer.no_decay", config.no_decay, flatten(params))
    mask = map_with_path(lambda path, _: not no_decay(path), params)
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    scale = {
        "adamw": lambda: adam,
        "adam": lambda: adam,
        "adafactor": lambda: optax.scale_by_factored_rms(),
        "lion": lambda: optax.scale_by_lion(config.beta1, config.beta2),
        "muon": lambda: _muon(config.beta1, adam, {p: axes[p][1:] for p in stacked}),
        "sgd": lambda: optax.trace(config.beta1) if config.beta1 else optax.identity(),
    }[config.name]()
    # Adafactor's own step size: no update is larger than 1 in root mean square (arXiv:1804.04235).
    limit = [optax.clip_by_block_rms(1.0)] if config.name == "adafactor" else []
    shrink = optax.add_decayed_weights(decay, mask)
    return [scale, *limit, shrink, optax.scale_by_learning_rate(schedule)]


def _muon(
    beta: float, others: optax.GradientTransformation, axes: dict[str, tuple[str | None, ...]]
) -> optax.GradientTransformation:
    """Muon (Jordan, 2024) for the matrices of the layers, `others` for everything else.

    Args:
      axes: logical axes of a layer's parameters. Of more than two, `embed` is a side of the matrix
        and the others its other side: the kernel [embed, heads, head_dim] has 2 sides.
    """
    sides = {path: _sides(names) for path, names in axes.items() if len(names) > 1}
    numbers = lambda tree: map_with_path(lambda path, _: sides[path], tree)  # noqa: E731
    scale = lambda update, of: update * _MUON_RMS * _longer_side(update.shape, of) ** 0.5  # noqa: E731
    matrices = optax.chain(
        scale_by_muon(beta=beta, weight_dimension_numbers=numbers),
        optax.stateless(lambda tree, _: map_with_path(lambda p, x: scale(x, sides[p]), tree)),
    )
    label = lambda path, _: "muon" if path in sides else "others"  # noqa: E731
    return optax.partition(
        {"muon": matrices, "others": others}, lambda tree: map_with_path(label, tree)
    )


def _sides(names: tuple[str | None, ...]) -> MuonDimensionNumbers:
    """Which dimensions of a kernel are its inputs, and which its outputs; experts are apart."""
    dims = [dim for dim, name in enumerate(names) if name != "experts"]
    inputs = 1 if names[dims[0]] == "embed" else len(dims) - 1
    return MuonDimensionNumbers(tuple(dims[:inputs]), tuple(dims[inputs:]))


def _longer_side(shape: tuple[int, ...], sides: MuonDimensionNumbers) -> int:
    return max(math.prod(shape[dim] for dim in side) for side in sides)


def _accumulated(optimizer: Optimizer, every: int) -> Optimizer:
    """Updates every so many steps, by the mean gradient over the tokens of all of them."""

    def init(params):
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return _Accumulated(optimizer.init(params), jnp.int32(0), jnp.float32(0), sums)

    def update(gradient, tokens, state, params, step, verdict=None):
        """A step whose update is dropped counts for nothing: the next takes its place."""
        if verdict is None:
            return added(gradient, tokens, state, params, step)
        scaled = jax.tree.map(lambda g: g * verdict.factor, gradient)
        taken = lambda: added(scaled, tokens, state, params, step)  # noqa: E731
        return jax.lax.cond(verdict.update, taken, lambda: (params, state))

    def added(gradient, tokens, state, params, step):
        sums = jax.tree.map(lambda s, g: s + g * tokens, state.gradient, gradient)
        tokens = state.tokens + tokens

        def last():
            mean = jax.tree.map(lambda s: s / jnp.maximum(tokens, 1e-9), sums)
            new_params, inner = optimizer.update(mean, tokens, state.state, params, step)
            zeros = jax.tree.map(jnp.zeros_like, sums)
            return new_params, _Accumulated(inner, jnp.int32(0), jnp.float32(0), zeros)

        def earlier():
            return params, _Accumulated(state.state, state.steps + 1, tokens, sums)

        return jax.lax.cond(state.steps + 1 == every, last, earlier)

    learning_rate = lambda step: optimizer.learning_rate(step // every)  # noqa: E731
    return Optimizer(init, update, learning_rate, optimizer.on_host)
