"""Each implementation of attention against the plain one, on one device and on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtpu.config import Config
from jaxtpu.errors import ConfigError
from jaxtpu.kernels import blockwise, splash
from jaxtpu.kernels.attention import choose_attention, xla_attention
from jaxtpu.kernels.flash import flash_attention, make_tiling
from jaxtpu.mesh import make_mesh
from jaxtpu.sharding import make_rules

IMPLEMENTATIONS = {
    "blockwise": functools.partial(blockwise.blockwise_attention, block=128),
    "splash": functools.partial(splash.splash_attention, interpret=True),
    "flash": functools.partial(flash_attention, interpret=True),
}


def arrays(dtype, B=2, T=200, H=6, K=3, D=64):
    """(queries, keys, values, segments, weights of the output); documents of uneven length."""
    random = np.random.default_rng(0)
    shapes = ((B, T, H, D), (B, T, K, D), (B, T, K, D))
    q, k, v = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
    starts = random.random((B, T)) < 4 / T
    segments = jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)
    weights = jnp.asarray(random.standard_normal((B, T, H, D)), jnp.float32)
    return q, k, v, segments, weights


def value_and_gradients(implementation, q, k, v, segments, weights):
    def loss(q, k, v):
        out = implementation(q, k, v, segments)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return (out, *gradients)


def assert_close(made, expected, tolerance):
    for name, a, b in zip(("out", "dq", "dk", "dv"), made, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "shape"),
    [
        ("bfloat16", 2e-2, {}),
        ("float32", 1e-5, {}),
        ("float32", 1e-5, {"D": 128, "T": 256, "H": 2, "K": 1}),
        ("float32", 1e-5, {"D": 24, "T": 72, "H": 2, "K": 2}),
    ],
)
def test_values_and_gradients_are_those_of_plain_attention(name, dtype, tolerance, shape):
    made = jax.jit(functools.partial(value_and_gradients, IMPLEMENTATIONS[name]))
    expected = jax.jit(functools.partial(value_and_gradients, xla_attention))
    inputs = arrays(dtype, **shape)
    assert_close(made(*inputs), expected(*inputs), tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flash_with_more_keys_than_memory(dtype):
    """Five blocks of queries; keys in three spans of two blocks, the last one half empty."""
    inputs = arrays(dtype, B=1, T=600, H=2, K=1)
    tiling = dataclasses.replace(make_tiling(600, 64, inputs[0].dtype), span=256, spans=3)
    assert (tiling.block, tiling.blocks) == (128, 5)
    flash = functools.partial(flash_attention, interpret=True, tiling=tiling)
    expected = value_and_gradients(xla_attention, *inputs)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    assert_close(value_and_gradients(flash, *inputs), expected, tolerance)


@pytest.mark.parametrize(
    ("length", "features", "dtype", "block", "span", "spans", "blocks"),
    [
        (2048, 128, "bfloat16", 512, 2048, 1, 4),
        (2048, 128, "float32", 512, 1024, 2, 4),
        (200, 64, "bfloat16", 256, 256, 1, 1),
        (1100, 128, "bfloat16", 128, 1152, 1, 9),
        (8704, 128, "bfloat16", 512, 2048, 5, 17),
    ],
)
def test_tiling(length, features, dtype, block, span, spans, blocks):
    made = make_tiling(length, features, jnp.dtype(dtype))
    assert (made.block, made.span, made.spans, made.blocks) == (block, span, spans, blocks)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 2, "tensor": 3}, {"data": 2, "tensor": 4}]
)
def test_a_mesh_changes_nothing(name, sizes):
    """6 query and 3 key heads on 2 (keys are not divided), 3 (both are), 4 parts (neither is)."""
    inputs = arrays("float32", B=4, T=72, D=8)
    expected = value_and_gradients(xla_attention, *inputs)
    assert_close(on_mesh(IMPLEMENTATIONS[name], sizes, inputs), expected, 1e-5)


def test_blockwise_on_a_divided_sequence():
    inputs = arrays("float32", B=4, T=144, D=8)
    expected = value_and_gradients(xla_attention, *inputs)
    sizes = {"fsdp": 2, "context": 2, "tensor": 2}
    made = on_mesh(functools.partial(blockwise.blockwise_attention, block=40), sizes, inputs)
    assert_close(made, expected, 1e-5)


def on_mesh(implementation, sizes, inputs):
    """Value and gradients under the default rules on emulated devices, rematerialised."""
    config = Config()
    mesh_sizes = {axis: 1 for axis in ("data", "fsdp", "expert", "context", "tensor")} | sizes
    mesh = make_mesh(mesh_sizes, jax.devices()[: np.prod(list(sizes.values()))])
    rules = make_rules(config.sharding, mesh)

    def run(*inputs):
        with rules.active():
            return value_and_gradients(jax.checkpoint(implementation), *inputs)

    return jax.jit(run)(*inputs)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_output_and_log_sum_exp_can_be_saved(name, capsys):
    q, k, v, segments, _ = arrays("float32", T=72, D=8)
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names("attention_out", "attention_lse")
    for policy, count in ((saved, 2), (policies.nothing_saveable, 0)):
        kept = jax.checkpoint(lambda q: IMPLEMENTATIONS[name](q, k, v, segments), policy=policy)
        jax.ad_checkpoint.print_saved_residuals(kept, q)
        lines = capsys.readouterr().out.splitlines()
        assert sum("constant" not in line and "argument" not in line for line in lines) == count


@pytest.mark.parametrize(
    ("name", "kind", "length", "parts", "chosen"),
    [
        ("auto", "cpu", 8192, 1, "xla"),
        ("auto", "TPU v2", 512, 1, "flash"),
        ("auto", "TPU v3", 4096, 1, "flash"),
        ("auto", "TPU v4", 512, 1, "splash"),
        ("auto", "TPU v6 lite", 8192, 1, "splash"),
        ("auto", "TPU v5", 1024, 2, "xla"),
        ("splash", "TPU v5", 8192, 2, "blockwise"),
        ("flash", "TPU v5", 2048, 1, "flash"),
        ("splash", "cpu", 128, 1, "splash"),
        ("xla", "TPU v4", 8192, 2, "xla"),
    ],
)
def test_the_choice(name, kind, length, parts, chosen):
    implementation, why = choose_attention(name, kind, length, parts)
    assert implementation == chosen and why


def test_a_kernel_that_does_not_compile_is_refused():
    with pytest.raises(ConfigError, match="does not compile for TPU v3"):
        choose_attention("splash", "TPU v3", 512)
