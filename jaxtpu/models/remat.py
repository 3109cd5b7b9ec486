"""Rematerialisation as data: what of a layer is kept for the backward pass."""

import jax

from jaxtpu.config.remat import NAMED, remat_actions
from jaxtpu.sharding import active_rules


def rematerialised(layer, policy: str, tensors: tuple[str, ...]):
    """`layer`, the body of a scan, with its intermediates kept or computed again as `policy` says.

    Args:
      policy: `model.remat`.
      tensors: `model.remat_tensors`.
    """
    if policy == "none":
        return layer
    # Within a scan the compiler cannot merge the two copies, so the barrier is not needed.
    return jax.checkpoint(layer, policy=_policy(policy, tensors), prevent_cse=False)


def _policy(policy: str, tensors: tuple[str, ...]):
    if policy not in NAMED:
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    actions = remat_actions(policy, tensors)
    offloaded = [name for name, action in actions.items() if action == "offload" and has_host()]
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in actions if name not in offloaded],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )


def has_host() -> bool:
    """Whether the devices of the active mesh are TPUs, which have host memory besides their own."""
    rules = active_rules()
    return rules is not None and rules.mesh.devices.flat[0].platform == "tpu"
