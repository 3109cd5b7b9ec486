"""Cross entropy over a vocabulary that may be divided over devices, and the logits that it takes."""

import jax
import jax.numpy as jnp

from jaxtpu.kernels.scores import soft_capped

_MASKED = -1e30


def logits_of(
    x: jax.Array, head_EV: jax.Array, vocab_size: int, soft_cap: float = 0.0
) -> jax.Array:
    """Logits, float32 [..., V], of features [..., E]; ids from `vocab_size` on, which only pad the
    vocabulary, have no probability.

    Args:
      soft_cap: logits are cap * tanh(logit / cap); 0 for no cap.
    """
    logits = jnp.matmul(x, head_EV, preferred_element_type=jnp.float32)
    return without_padding(soft_capped(logits, soft_cap), vocab_size)


def without_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """`logits` with no probability for ids from `vocab_size` on."""
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, _MASKED)


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> jax.Array:
    """Loss of each position, nats, float32 [...].

    Targets may be probabilities of all classes instead: [..., V], as mixed images have them.

    The target's logit is picked by comparison, not by indexing: a gather along a divided
    vocabulary would collect the logits on every device.

    Args:
      logits: [..., V].
      targets: ids [...], or probabilities [..., V].
      vocab_size: ids that are not padding; None for all V.
      label_smoothing: probability that is spread evenly over all ids (arXiv:1512.00567, section 7).
      z_loss: factor of the squared log of the softmax's denominator (arXiv:2204.02311, section 5).
    """
    logits = logits.astype(jnp.float32)
    ids_V = jnp.arange(logits.shape[-1])
    if targets.ndim == logits.ndim:
        picked = jnp.sum(targets * logits, axis=-1)
    else:
        picked = jnp.sum(jnp.where(ids_V == targets[..., None], logits, 0.0), axis=-1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    if label_smoothing:
        size = vocab_size or logits.shape[-1]
        mean = jnp.sum(jnp.where(ids_V < size, logits, 0.0), axis=-1) / size
        picked = (1 - label_smoothing) * picked + label_smoothing * mean
    return log_z - picked + z_loss * log_z**2
