"""Attention: which implementation a device and a shape get, and the plain one, the reference.

Dimensions: B batch, T query and S key positions, H query heads, K key/value heads, G = H / K,
D features of a head.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtpu.errors import ConfigError
from jaxtpu.hardware import generation_of
from jaxtpu.kernels.blockwise import MASKED, blockwise_attention
from jaxtpu.kernels.placement import repeat_undivided, sequence_parts
from jaxtpu.kernels.scores import CAUSAL, Scores
from jaxtpu.sharding import active_rules

_NO_BF16_KERNELS = ("v2", "v3")  # Mosaic refuses a bf16 right-hand side of a product there
_KERNELS = ("flash", "splash")
_LONG = 2048  # positions from which scores of T x T are not held


def choose_attention(
    name: str,
    device_kind: str,
    length: int,
    sequence_parts: int = 1,
    special: tuple[str, ...] = (),
) -> tuple[str, str]:
    """(implementation, why) for the config's `model.attention`.

    Args:
      device_kind: of JAX.
      length: positions of a sequence.
      sequence_parts: that the mesh divides a sequence into.
      special: `Scores.special`: what the model asks of attention that flash has not.

    Raises:
      ConfigError: the kernel that is asked for does not compile for the device, or has not what
        the model asks for.
    """
    generation = generation_of(device_kind)
    plain, size = ("xla", "short") if length <= _LONG else ("blockwise", "long")
    if name not in ("auto", *_KERNELS):
        return name, "set in the config"
    if name == "flash" and special:
        raise ConfigError(
            "model.attention", name, f"has no {special[0]}.", f"Use {plain}, or auto."
        )
    if sequence_parts > 1:
        return plain, (
            f"the sequence is divided in {sequence_parts} (mesh.context), which the kernels are "
            f"not made for; {length} positions are {size}"
        )
    if generation is None:
        if name == "auto":
            return "xla", f"{device_kind} has no kernel of ours"
        return name, f"set in the config; interpreted on {device_kind}, which is slow"
    early = generation.name in _NO_BF16_KERNELS
    if early and name == "splash":
        raise ConfigError(
            "model.attention", name, f"does not compile for {device_kind}.", "Use flash or auto."
        )
    if name != "auto":
        return name, "set in the config"
    if early and special:
        return plain, f"flash has no {special[0]}; {length} positions are {size}"
    if early:
        return "flash", f"our kernel for {device_kind}, for which JAX's do not compile"
    return "splash", f"JAX's kernel for {device_kind}"


def attention(
    name: str,
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segment_ids_BT: jax.Array,
    scores: Scores = CAUSAL,
) -> jax.Array:
    """Attention by the implementation that `name` chooses; see `xla_attention` for the rest."""
    rules = active_rules()
    kind = rules.mesh.devices.flat[0].device_kind if rules else "cpu"
    parts = sequence_parts(rules)
    chosen, _ = choose_attention(name, kind, q_BTHD.shape[1], parts, scores.special)
    implementation = _implementation(chosen, interpret=generation_of(kind) is None)
    return implementation(q_BTHD, k_BSKD, v_BSKD, segment_ids_BT, scores=scores)


def _implementation(name: str, interpret: bool) -> Callable[..., jax.Array]:
    """Kernels are imported where they are used: Pallas takes its time."""
    if name == "flash":
        from jaxtpu.kernels.flash import flash_attention

        return functools.partial(flash_attention, interpret=interpret)
    if name == "splash":
        from jaxtpu.kernels.splash import splash_attention

        return functools.partial(splash_attention, interpret=interpret)
    return {"xla": xla_attention, "blockwise": blockwise_attention}[name]


def xla_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    scores: Scores = CAUSAL,
) -> jax.Array:
    """Attention within each document; scores and softmax in float32.

    Args:
      q_BTHD, k_BSKD, v_BSKD: H is a multiple of K: each key head serves a group of query heads.
      segment_ids_BT: position i attends to those of its own segment that `scores` lets it see:
        with the default, to j <= i.

    Returns:
      [B, T, H, D] in the dtype of `v_BSKD`.
    """
    B, T, H, D = q_BTHD.shape
    k_BSKD, v_BSKD = repeat_undivided(k_BSKD, v_BSKD, H)
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    scores_BKGTS = jnp.einsum(
        "BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32
    )
    mask_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    mask_BTS &= scores.sees(jnp.arange(T)[:, None], jnp.arange(T)[None, :])
    scores_BKGTS = jnp.where(
        mask_BTS[:, None, None], scores.capped(scores_BKGTS * scores.scale(D)), MASKED
    )
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKD.dtype)
    out_BTKGD = jnp.einsum("BKGTS,BSKD->BTKGD", weights_BKGTS, v_BSKD)
    return checkpoint_name(out_BTKGD.reshape(B, T, H, D), "attention_out")
