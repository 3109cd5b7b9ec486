"""Whether an update is made: losses and gradients that are not finite, and spikes, on the device."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxtpu.config import GuardConfig

# Of ZClip (arXiv:2504.02507, section 3): how fast the norm's mean and variance follow it, and
# after how many updates they are known.
_DECAY, _KNOWN_AFTER = 0.97, 25


@flax.struct.dataclass
class Guard:
    """What the guard remembers from step to step, scalars.

    Attributes:
      in_row: updates dropped since the last one that was made, int32.
      dropped: updates dropped since the start, int32.
      seen: updates made, int32.
      mean, variance: of the gradient's norm, after clipping, as the last updates had it; float32.
    """

    in_row: jax.Array
    dropped: jax.Array
    seen: jax.Array
    mean: jax.Array
    variance: jax.Array


class Verdict(NamedTuple):
    """What a step does.

    Attributes:
      update: whether its update is made.
      advance: whether it counts as a step. From the step on at which the run has to stop or to go
        back, none does, so that the state stays what it was before.
      factor: what the gradient is multiplied by.
      guard: after the step.
    """

    update: jax.Array
    advance: jax.Array
    factor: jax.Array
    guard: Guard


def new_guard() -> Guard:
    """Before the first step."""
    count, value = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    return Guard(count, count, count, value, value)


def tolerated(config: GuardConfig) -> int:
    """Dropped updates in a row, from which on the run does not go on."""
    return config.limit if config.nonfinite == "skip" else 1


def judge(config: GuardConfig, guard: Guard, loss: jax.Array, norm: jax.Array) -> Verdict:
    """The verdict on a step with this mean loss and this global norm of its gradient."""
    limit = tolerated(config)
    halted = guard.in_row >= limit
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    update = finite & ~halted
    in_row = jnp.where(halted, guard.in_row, jnp.where(finite, 0, guard.in_row + 1))
    factor = _spike_factor(config.clip_zscore, guard, norm)
    new = _after_update(guard, norm * factor)
    kept = jax.tree.map(lambda after, before: jnp.where(update, after, before), new, guard)
    dropped = guard.dropped + (~finite & ~halted)
    return Verdict(update, in_row < limit, factor, kept.replace(in_row=in_row, dropped=dropped))


def _spike_factor(limit: float, guard: Guard, norm: jax.Array) -> jax.Array:
    """1, or less where the norm is more than `limit` standard deviations above its mean: the more
    it is, the nearer to the mean it is brought (ZClip, equation 4)."""
    if not limit:
        return jnp.ones((), jnp.float32)
    deviation = jnp.sqrt(guard.variance)
    score = (norm - guard.mean) / jnp.maximum(deviation, 1e-30)
    spike = (guard.seen >= _KNOWN_AFTER) & (score > limit)
    clipped = guard.mean + limit**2 / jnp.maximum(score, limit) * deviation
    return jnp.where(spike, clipped / norm, 1.0)


def _after_update(guard: Guard, norm: jax.Array) -> Guard:
    decay = jnp.minimum(_DECAY, guard.seen / (guard.seen + 1.0))  # of few, the plain mean
    mean = decay * guard.mean + (1 - decay) * norm
    variance = decay * guard.variance + (1 - decay) * jnp.square(norm - mean)
    return guard.replace(seen=guard.seen + 1, mean=mean, variance=variance)
