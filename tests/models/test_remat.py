"""Rematerialisation changes what is kept, never a gradient."""

import jax
import numpy as np
import pytest

from jaxtpu.config.remat import NAMED, POLICIES, remat_actions
from jaxtpu.errors import ConfigError
from jaxtpu.plan.jaxpr import results, scans
from tests.tiny import fixed_batch, programs_on, put

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
TENSORS = ("mlp_gate=save", "mlp_up=offload", "query=save")


def gradient(remat: str, tensors: tuple[str, ...] = (), group: int = 1, layers: int = 3):
    model = {"remat": remat, "remat_tensors": tensors, "attention": "blockwise"}
    model |= {"remat_group": group, "layers": layers}
    programs = programs_on(MESH, model=model)

    def loss(params, batch):
        with programs.rules.active():
            logits_BTV = programs.model.apply(params, batch)
        return jax.nn.logsumexp(logits_BTV, axis=-1).mean()

    params, batch = programs.init().params, put(programs, fixed_batch())
    return jax.device_get(jax.jit(jax.grad(loss))(params, batch))


@pytest.fixture(scope="module")
def plain():
    return gradient("none")


@pytest.mark.parametrize(
    ("remat", "tensors"),
    [*[(policy, ()) for policy in POLICIES if policy != "none"], ("save_attention_out", TENSORS)],
)
def test_a_policy_changes_no_gradient(remat, tensors, plain):
    made = gradient(remat, tensors)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(plain), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize(
    ("remat", "layers", "group"), [("full", 4, 2), ("none", 3, 2), ("save_qkv", 5, 3)]
)
def test_groups_of_layers_change_no_gradient(remat, layers, group):
    pairs = (gradient(remat, group=g, layers=layers) for g in (group, 1))
    for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def saved_bytes(remat: str, tensors: tuple[str, ...] = ()) -> int:
    """Of what the forward scan stacks for the backward one, with a kernel that names its results."""
    model = {"remat": remat, "remat_tensors": tensors, "attention": "blockwise"}
    programs = programs_on({}, devices=1, model=model)
    traced = programs.train_step.trace(programs.abstract_state, programs.abstract_batch)
    over_layers = [scan for scan in scans(traced.jaxpr.jaxpr) if scan.params["length"] == 3]
    forward = next(scan for scan in over_layers if not scan.params["reverse"])
    return sum(value.aval.size * value.aval.dtype.itemsize for value in results(forward)[1])


def test_each_policy_keeps_what_it_names():
    tokens, layers, size = 16 * 24, 3, 4
    base = saved_bytes("full")
    assert base == tokens * layers * 48 * size  # the input of each layer
    heads = tokens * layers * size * 8  # of one head, 8 features
    assert saved_bytes("save_qkv") == base + 12 * heads
    out = saved_bytes("save_attention_out")
    assert out == base + 6 * heads + 6 * heads // 8  # and a log-sum-exp for each head
    assert saved_bytes("save_attention") == out + 12 * heads
    assert saved_bytes("dots") == base + 12 * heads + tokens * layers * (48 + 2 * 96) * size
    assert saved_bytes("save_attention", ("query=remat", "mlp_gate=save")) == (
        out + 6 * heads + tokens * layers * 96 * size
    )


def test_tensors_change_the_policy():
    assert remat_actions("full", ("query = offload",)) == {"query": "offload"}
    assert remat_actions("save_qkv", ("key=remat",)) == {"query": "save", "value": "save"}
    assert tuple(remat_actions("dots", ("mlp_up=remat",))) == NAMED["dots"][:-1]
    assert set(NAMED["save_attention"]) >= set(NAMED["save_attention_out"])


@pytest.mark.parametrize(
    ("remat", "tensor", "words"),
    [
        ("full", "mlp_gat=save", "Did you mean 'mlp_gate'"),
        ("full", "mlp_gate=keep", "mlp_gate=offload"),
        ("full", "mlp_gate", "mlp_gate=save"),
        ("none", "mlp_gate=save", "model.remat=full"),
    ],
)
def test_a_wrong_tensor_is_an_error_with_the_right_one(remat, tensor, words):
    with pytest.raises(ConfigError, match=words):
        programs_on(MESH, model={"remat": remat, "remat_tensors": (tensor,)})
