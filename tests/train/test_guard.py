"""The guard on the device: what is dropped changes nothing, and what spikes is brought down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtpu.config import GuardConfig
from jaxtpu.train.guard import judge, new_guard
from tests.tiny import fixed_batch, programs_on, put, run_steps


def poisoned(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    weights = batch["weights"].copy()
    weights[3, 0] = np.nan
    return batch | {"weights": weights}


def same(first, second) -> bool:
    return jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(a, b), *jax.device_get((first, second)))
    )


GOOD = [fixed_batch(seed) for seed in range(4)]


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"name": "adafactor"},
        {"name": "muon"},
        {"rounding": "master"},
        {"average": 0.9},
        {"clip_norm": 0.5},
        {"accumulate_steps": 2},
    ],
    ids=lambda optimizer: "-".join(map(str, optimizer.values())) or "adamw",
)
def test_a_skipped_step_leaves_all_as_it_was(optimizer):
    params = {"precision": {"params": "bfloat16"}} if "rounding" in optimizer else {}
    guard = {"nonfinite": "skip", "limit": 3}
    programs = programs_on({"fsdp": 4, "tensor": 2}, optimizer=optimizer, guard=guard, **params)
    plain, _ = run_steps(programs, GOOD)
    batches = [GOOD[0], poisoned(GOOD[1]), GOOD[1], poisoned(GOOD[0]), poisoned(GOOD[2]), *GOOD[2:]]
    state, history = run_steps(programs, batches)
    assert [metrics["dropped"] for metrics in history] == [0, 1, 0, 1, 2, 0, 0]
    assert int(state.guard.dropped) == 3
    assert int(state.step) == 7, "a step that is skipped is done: the data go on"
    # The learning rate and the random numbers are those of the step, which is another one.
    for before, after in zip(
        jax.tree.leaves(plain.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(np.float32(before), np.float32(after), atol=5e-3)
        assert np.isfinite(np.float32(after)).all()


def test_a_dropped_update_is_dropped_bit_for_bit():
    guard = {"nonfinite": "skip", "limit": 3}
    programs = programs_on({"fsdp": 8}, guard=guard, optimizer={"average": 0.9})
    before, _ = run_steps(programs, GOOD[:2])
    after, _ = run_steps(programs, [*GOOD[:2], poisoned(GOOD[2])])
    for name in ("params", "opt_state", "average"):
        assert same(getattr(before, name), getattr(after, name)), name


def test_at_the_limit_the_state_stays_what_it_was_whatever_comes_after():
    programs = programs_on({"fsdp": 8}, guard={"nonfinite": "stop"})
    before, _ = run_steps(programs, GOOD[:2])
    after, history = run_steps(programs, [*GOOD[:2], poisoned(GOOD[2]), GOOD[2], GOOD[3]])
    assert [metrics["dropped"] for metrics in history] == [0, 0, 1, 1, 1]
    assert int(after.step) == 2
    assert same((before.params, before.opt_state), (after.params, after.opt_state))


def test_without_a_fault_the_guard_changes_no_bit():
    plain, _ = run_steps(programs_on({"fsdp": 8}, guard={"nonfinite": "stop"}), GOOD)
    skipping, _ = run_steps(programs_on({"fsdp": 8}, guard={"nonfinite": "skip"}), GOOD)
    assert same((plain.params, plain.opt_state), (skipping.params, skipping.opt_state))


def norms_seen(zscore: float, norms: list[float]) -> list[float]:
    guard, factors = new_guard(), []
    for norm in norms:
        verdict = judge(GuardConfig(clip_zscore=zscore), guard, jnp.float32(1), jnp.float32(norm))
        guard = verdict.guard
        factors.append(float(verdict.factor))
    return factors


def test_a_spike_is_brought_down_as_zclip_says():
    random = np.random.default_rng(0)
    usual = list(random.normal(1.0, 0.1, 60))
    factors = norms_seen(2.5, [*usual, 5.0, *usual])
    # Equation 4 of arXiv:2504.02507 by numpy, with the moments of the norms as they were clipped.
    mean = variance = 0.0
    for seen, norm in enumerate(np.multiply(usual, factors[:60])):
        decay = min(0.97, seen / (seen + 1))
        mean = decay * mean + (1 - decay) * norm
        variance = decay * variance + (1 - decay) * (norm - mean) ** 2
    score = (5.0 - mean) / variance**0.5
    assert factors[60] * 5.0 == pytest.approx(mean + 2.5**2 / score * variance**0.5, rel=1e-3)
    assert min(factors[:25]) == 1.0, "nothing is clipped before the moments are known"
    assert np.mean(np.array(factors[61:]) < 1) < 0.1
    assert norms_seen(0.0, [1.0] * 40 + [1e6]) == [1.0] * 41


def test_a_clipped_step_is_that_of_the_scaled_gradient():
    sections = {"optimizer": {"name": "sgd", "weight_decay": 0.0, "clip_norm": 0.0}}
    spiked = programs_on({"fsdp": 8}, guard={"clip_zscore": 0.5}, **sections)
    free = programs_on({"fsdp": 8}, **sections)
    state = spiked.init()
    known = state.guard.replace(
        seen=jnp.int32(100), mean=jnp.float32(0.01), variance=jnp.float32(1e-4)
    )
    start, guard = jax.device_get((state.params, known))
    state = jax.device_put(
        state.replace(guard=known), jax.tree.map(lambda leaf: leaf.sharding, spiked.abstract_state)
    )
    clipped, metrics = spiked.train_step(state, put(spiked, GOOD[0]))
    norm = float(metrics["grad_norm"])
    verdict = judge(GuardConfig(clip_zscore=0.5), guard, jnp.float32(1), norm)
    factor = float(verdict.factor)
    assert 0 < factor < 0.2
    plain, _ = free.train_step(free.init(), put(free, GOOD[0]))
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, clipped.params, start)
    wanted = jax.tree.map(lambda new, old: factor * (np.asarray(new) - old), plain.params, start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), moved, wanted)
