"""Which tensors of a layer the backward pass finds kept, by name."""

from jaxtpu.errors import ConfigError, nearest

# In the order that a layer makes them. `query` and `key` are as attention takes them, rotated.
TENSORS = (
    "query", "key", "value", "attention_out", "attention_lse", "attention_projection", "mlp_gate",
    "mlp_up", "mlp_hidden",
)  # fmt: skip
# Without its log-sum-exp, the output is no use: the kernel would run again.
_QKV, _ATTENTION = ("query", "key", "value"), ("attention_out", "attention_lse")
# Kept by each policy; `none` keeps whatever the backward pass reads.
NAMED = {
    "full": (),
    "save_qkv": _QKV,
    "save_attention_out": _ATTENTION,
    "save_attention": (*_QKV, *_ATTENTION),
    "dots": (*_QKV, "attention_projection", "mlp_gate", "mlp_up"),  # products with weights
}
POLICIES = ("none", *NAMED)
_ACTIONS = ("remat", "save", "offload")


def remat_actions(policy: str, tensors: tuple[str, ...]) -> dict[str, str]:
    """`save` or `offload` for each tensor that is kept; the others are computed again.

    Args:
      policy: one of `POLICIES`.
      tensors: `NAME=ACTION` of the tensors that are treated otherwise.

    Raises:
      ConfigError: `tensors` has a name or an action that there is not, or the policy is `none`.
    """
    actions = dict.fromkeys(NAMED.get(policy, ()), "save")
    for entry in tensors:
        name, _, action = (word.strip() for word in entry.partition("="))
        if name not in TENSORS:
            raise ConfigError(
                "model.remat_tensors", entry, f"{name!r} is no tensor of a layer.",
                nearest(name, TENSORS),
            )  # fmt: skip
        if action not in _ACTIONS:
            raise ConfigError(
                "model.remat_tensors", entry, f"{action!r} is not what can be done with it.",
                f"Use {name}=save, {name}=offload or {name}=remat.",
            )  # fmt: skip
        if policy not in NAMED:
            raise ConfigError(
                "model.remat_tensors", entry, f"model.remat={policy} keeps every tensor.",
                "Use model.remat=full with it.",
            )  # fmt: skip
        actions[name] = action
    return {name: action for name, action in actions.items() if action != "remat"}
