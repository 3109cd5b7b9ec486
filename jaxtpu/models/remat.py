"""Rematerialisation as data: what of the layers is kept for the backward pass."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxtpu.config import ModelConfig
from jaxtpu.config.remat import remat_actions
from jaxtpu.mesh import has_host_memory
from jaxtpu.sharding import active_rules


def scan_layers(
    pattern: Sequence[Callable[[Any, Any], Any]], x: Any, params_L: Any, config: ModelConfig
) -> Any:
    """`layer(x, params)` for each of L parameters in turn, with what `config` says kept.

    With `remat_group` g, the input of each g-th layer is all that is kept from the forward pass;
    the backward pass runs g layers again at a time, and keeps of them what `remat` says (square-root
    checkpointing, arXiv:1604.06174).

    Args:
      pattern: the kinds of layers, repeated over the L: the body that is scanned is all of them.
        The result of each has the structure and the shapes of `x`.
      params_L: tree of arrays stacked along a first axis.
    """
    layers, period = jax.tree.leaves(params_L)[0].shape[0], len(pattern)
    whole = layers // period * period
    # A loop that runs once is no loop to the compiler, which would merge the two copies.
    body = _period(pattern, config, prevent_cse=1 < period == whole)
    if period == 1:
        return _scan(body, x, params_L, layers, config.remat_group)
    in_periods = lambda p: p[:whole].reshape(-1, period, *p.shape[1:])  # noqa: E731
    group = max(1, config.remat_group // period)
    x = _scan(body, x, jax.tree.map(in_periods, params_L), layers // period, group)
    rest = _period(pattern[: layers - whole], config, prevent_cse=True)
    return rest(x, jax.tree.map(lambda p: p[whole:], params_L))[0]


def _scan(body, x: Any, params_L: Any, layers: int, group: int) -> Any:
    """`body` over `layers` parameters, checkpointed in groups of so many."""

    def run(x, params_L):
        return jax.lax.scan(body, x, params_L)[0]

    if not 1 < group < layers:
        return run(x, params_L)
    run_again = jax.checkpoint(run, prevent_cse=False)
    rest = layers % group
    whole = jax.tree.map(lambda p: p[rest:].reshape(-1, group, *p.shape[1:]), params_L)
    if rest:
        x = run_again(x, jax.tree.map(lambda p: p[:rest], params_L))
    return jax.lax.scan(lambda x, params_G: (run_again(x, params_G), None), x, whole)[0]


def _period(pattern: Sequence[Callable[[Any, Any], Any]], config: ModelConfig, prevent_cse: bool):
    """The body of a scan: of one layer, or of several with their parameters stacked; intermediates
    are kept or computed again as `config` says."""

    def rematerialised(layer):
        body = lambda x, params: (layer(x, params), None)  # noqa: E731
        if config.remat == "none":
            return body
        # Within a scan the compiler cannot merge the two copies, so the barrier is not needed.
        policy = _policy(config.remat, config.remat_tensors)
        return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)

    bodies = [rematerialised(layer) for layer in pattern]
    if len(bodies) == 1 and not prevent_cse:
        return bodies[0]

    def period(x, params_P):
        for i, body in enumerate(bodies):
            x, _ = body(x, jax.tree.map(operator.itemgetter(i), params_P))
        return x, None

    return period


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
