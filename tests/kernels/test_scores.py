"""Windows, soft caps, other scales and both directions, in each implementation that has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtpu.errors import ConfigError
from jaxtpu.kernels.attention import choose_attention, xla_attention
from jaxtpu.kernels.scores import Scores
from tests.kernels.test_attention import (
    IMPLEMENTATIONS,
    arrays,
    assert_close,
    on_mesh,
    value_and_gradients,
)

CASES = {
    "window": Scores(window=37),
    "window of a block": Scores(window=128),
    "soft cap": Scores(soft_cap=2.0),
    "scale": Scores(scalar=100.0),
    "both directions": Scores(causal=False),
    "all": Scores(window=50, soft_cap=3.0, scalar=16.0),
    "window to both sides": Scores(causal=False, window=20),
}


def by_definition(q_BTHD, k_BTKD, v_BTKD, segments_BT, scores):
    """One query at a time, in double precision."""
    q, k, v, segments = (np.asarray(x, np.float64) for x in (q_BTHD, k_BTKD, v_BTKD, segments_BT))
    (B, T, H, D), K = q.shape, k.shape[2]
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(B, T, H):
        low = max(0, t - scores.window + 1) if scores.window else 0
        high = t + 1 if scores.causal else (t + scores.window if scores.window else T)
        seen = [s for s in range(low, min(high, T)) if segments[b, s] == segments[b, t]]
        products = k[b, seen, h * K // H] @ q[b, t, h] / np.sqrt(scores.scalar or D)
        if scores.soft_cap:
            products = scores.soft_cap * np.tanh(products / scores.soft_cap)
        weights = np.exp(products - products.max())
        out[b, t, h] = weights / weights.sum() @ v[b, seen, h * K // H]
    return out


@pytest.fixture(scope="module")
def expected():
    @functools.cache
    def of(case):
        plain = functools.partial(xla_attention, scores=CASES[case])
        return jax.jit(functools.partial(value_and_gradients, plain))(*arrays("float32"))

    return of


@pytest.mark.parametrize("case", CASES)
def test_plain_attention_is_the_definition(case):
    q, k, v, segments, _ = arrays("float32", B=1, T=60, H=2, K=1, D=8)
    made = jax.jit(functools.partial(xla_attention, scores=CASES[case]))(q, k, v, segments)
    np.testing.assert_allclose(
        made, by_definition(q, k, v, segments, CASES[case]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in IMPLEMENTATIONS for c in CASES if n != "flash" or not CASES[c].special],
)
def test_values_and_gradients_are_those_of_plain_attention(name, case, expected):
    scores = CASES[case]
    kernel = functools.partial(IMPLEMENTATIONS[name], scores=scores)
    made = jax.jit(functools.partial(value_and_gradients, kernel))(*arrays("float32"))
    assert_close(made, expected(case), 2e-5)


def test_a_window_on_a_divided_sequence():
    inputs = arrays("float32", B=4, T=144, D=8)
    scores = Scores(window=30, soft_cap=2.0)
    plain = functools.partial(xla_attention, scores=scores)
    kernel = functools.partial(IMPLEMENTATIONS["blockwise"], scores=scores)
    made = on_mesh(kernel, {"fsdp": 2, "context": 2, "tensor": 2}, inputs)
    assert_close(made, value_and_gradients(plain, *inputs), 1e-5)


def test_blocks_beyond_the_window_are_left_out():
    from jaxtpu.kernels.blockwise import Blocks

    causal, window = Blocks(64, 64, 512), Blocks(64, 64, 512, Scores(window=64))
    assert len(causal.pairs[0]) == 36
    assert len(window.pairs[0]) == 15  # each block of queries sees its own keys and those before
    assert len(Blocks(64, 64, 512, Scores(causal=False)).pairs[0]) == 64


def test_a_kernel_without_it_is_passed_over_or_refused():
    special = Scores(window=8).special
    assert choose_attention("auto", "TPU v3", 512, 1, special)[0] == "xla"
    chosen, why = choose_attention("auto", "TPU v3", 4096, 1, special)
    assert chosen == "blockwise" and "model.text.sliding_window" in why
    assert choose_attention("auto", "TPU v5 lite", 4096, 1, special)[0] == "splash"
    with pytest.raises(ConfigError, match="Use blockwise, or auto"):
        choose_attention("flash", "TPU v3", 4096, 1, Scores(soft_cap=1.0).special)


def test_the_cap_has_a_gradient_in_the_loss_by_chunks():
    from jaxtpu.kernels.chunked_loss import token_sums
    from jaxtpu.kernels.cross_entropy import logits_of
    from jaxtpu.train.task import PerToken

    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 12, 8)), jnp.float32)
    head = jnp.asarray(random.normal(size=(8, 32)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 29, (2, 12)), jnp.int32)
    weights, per_token = jnp.ones((2, 12)), PerToken("cross_entropy")

    def whole(x, head):
        return per_token(logits_of(x, head, 29, 1.5), targets)["loss"].sum()

    def chunked(x, head):
        options = {"vocab_size": 29, "chunk": 5, "soft_cap": 1.5}
        return token_sums(per_token, x, head, targets, weights, **options)["loss"]

    for a, b in zip(
        jax.value_and_grad(whole, (0, 1))(x, head)[1],
        jax.value_and_grad(chunked, (0, 1))(x, head)[1],
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
