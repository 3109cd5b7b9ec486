"""Rematerialisation as data: what of the layers is kept for the backward pass."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtpu.config import ModelConfig
from jaxtpu.config.remat import remat_actions
from jaxtpu.mesh import has_host_memory
from jaxtpu.sharding import active_rules


def scan_layers(
    layer: Callable[[jax.Array, Any], jax.Array], x: jax.Array, params_L: Any, config: ModelConfig
) -> jax.Array:
    """`layer(x, params)` for each of L parameters in turn, with what `config` says kept.

    With `remat_group` g, the input of each g-th layer is all that is kept from the forward pass;
    the backward pass runs g layers again at a time, and keeps of them what `remat` says (square-root
    checkpointing, arXiv:1604.06174).

    Args:
      layer: its result has the shape of `x`.
      params_L: tree of arrays stacked along a first axis.
    """
    body = _rematerialised(lambda x, params: (layer(x, params), None), config)

    def run(x, params_L):
        return jax.lax.scan(body, x, params_L)[0]

    layers, group = config.layers, config.remat_group
    if not 1 < group < layers:
        return run(x, params_L)
    run_again = jax.checkpoint(run, prevent_cse=False)
    rest = layers % group
    whole = jax.tree.map(lambda p: p[rest:].reshape(-1, group, *p.shape[1:]), params_L)
    if rest:
        x = run_again(x, jax.tree.map(lambda p: p[:rest], params_L))
    return jax.lax.scan(lambda x, params_G: (run_again(x, params_G), None), x, whole)[0]


def _rematerialised(body, config: ModelConfig):
    """The body of a scan, with its intermediates kept or computed again as `config` says."""
    if config.remat == "none":
        return body
    # Within a scan the compiler cannot merge the two copies, so the barrier is not needed.
    policy = _policy(config.remat, config.remat_tensors)
    return jax.checkpoint(body, policy=policy, prevent_cse=False)


def _policy(policy: str, tensors: tuple[str, ...]):
    actions, rules = remat_actions(policy, tensors), active_rules()
    can_offload = rules is not None and has_host_memory(rules.mesh)
    offloaded = [name for name, action in actions.items() if action == "offload" and can_offload]
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in actions if name not in offloaded],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
