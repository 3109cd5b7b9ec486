"""Cross entropy over a vocabulary that may be divided over devices."""

import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Loss of each position, nats, float32 [B, T].

    The target's logit is picked by comparison, not by indexing: a gather along a divided
    vocabulary would collect the logits on every device.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    ids_V = jnp.arange(logits_BTV.shape[-1])
    picked_BT = jnp.sum(jnp.where(ids_V == targets_BT[..., None], logits_BTV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT
