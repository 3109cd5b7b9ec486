"""Attention. Dimensions: B batch, T query and S key positions, H query heads, K key/value heads,
G = H / K, D features of a head."""

import jax
import jax.numpy as jnp

from jaxtpu.sharding import active_rules, constrain

_MASKED = -1e30  # not -inf: a row with nothing to attend to stays finite


def choose_attention(name: str, device_kind: str) -> tuple[str, str]:
    """(implementation, why) for the config's `model.attention` on a kind of device."""
    if name != "auto":
        return name, "set in the config"
    return "xla", f"plain attention, the one implementation so far ({device_kind} has no other)"


def attention(
    name: str, q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Attention by the implementation that `name` chooses; see `xla_attention` for the rest."""
    rules = active_rules()
    kind = rules.mesh.devices.flat[0].device_kind if rules else "cpu"
    implementation, _ = choose_attention(name, kind)
    return IMPLEMENTATIONS[implementation](q_BTHD, k_BSKD, v_BSKD, segment_ids_BT)


def xla_attention(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention within each document; scores and softmax in float32.

    Args:
      q_BTHD, k_BSKD, v_BSKD: H is a multiple of K: each key head serves a group of query heads.
      segment_ids_BT: position i attends to j <= i of the same segment.

    Returns:
      [B, T, H, D] in the dtype of `v_BSKD`.
    """
    B, T, H, D = q_BTHD.shape
    rules = active_rules()
    if rules and not rules.divides("kv_heads", k_BSKD.shape[2]):
        # Groups would straddle devices: give each query head its own copy of its key head.
        repeats = H // k_BSKD.shape[2]
        k_BSKD = constrain(jnp.repeat(k_BSKD, repeats, 2), "batch", None, "heads", None)
        v_BSKD = constrain(jnp.repeat(v_BSKD, repeats, 2), "batch", None, "heads", None)
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    scores_BKGTS = jnp.einsum(
        "BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32
    )
    mask_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    mask_BTS &= jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS * D**-0.5, _MASKED)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKD.dtype)
    return jnp.einsum("BKGTS,BSKD->BTKGD", weights_BKGTS, v_BSKD).reshape(B, T, H, D)


IMPLEMENTATIONS = {"xla": xla_attention}
