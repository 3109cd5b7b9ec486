"""The chunked cross entropy against the plain one over all logits, on one device and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtpu.config import Config
from jaxtpu.kernels.chunked_loss import automatic_chunk, token_sums
from jaxtpu.kernels.cross_entropy import cross_entropy, logits_of
from jaxtpu.mesh import make_mesh
from jaxtpu.plan.compiler import CompileRequest, compile_all, read_hlo
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.sharding import make_rules
from jaxtpu.train.task import PerToken
from tests.tiny import VOCABULARY, tiny_config

OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2}
MESHES = {
    "one device": {},
    "data=2,fsdp=2,tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp=2,context=2,tensor=2": {"fsdp": 2, "context": 2, "tensor": 2},
    "tensor=8": {"tensor": 8},
}


def rules_on(sizes):
    sizes = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1) | sizes
    devices = int(np.prod(list(sizes.values())))
    return make_rules(Config().sharding, make_mesh(sizes, jax.devices()[:devices]))


def arrays(vocab_size, padded, B=4, T=30, E=24):
    random = np.random.default_rng(0)
    x_BTE = random.standard_normal((B, T, E)).astype("f4")
    head_EV = (0.3 * random.standard_normal((E, padded))).astype("f4")
    targets_BT = random.integers(0, vocab_size, (B, T)).astype("i4")
    weights_BT = (random.random((B, T)) < 0.8).astype("f4")  # the others are ignored
    return x_BTE, head_EV, targets_BT, weights_BT


def plain(options, vocab_size, x_BTE, head_EV, targets_BT, weights_BT):
    """(sums, gradients of the loss) from the logits of all tokens."""

    def loss(x_BTE, head_EV):
        logits_BTV = logits_of(x_BTE, head_EV, vocab_size)
        hit_BT = jnp.argmax(logits_BTV, axis=-1) == targets_BT
        sums = {
            "loss": jnp.sum(cross_entropy(logits_BTV, targets_BT, **options) * weights_BT),
            "accuracy": jnp.sum(hit_BT * weights_BT),
        }
        return sums["loss"], sums

    gradients, sums = jax.grad(loss, (0, 1), has_aux=True)(x_BTE, head_EV)
    return sums, gradients


def chunked(per_token, vocab_size, chunk, x_BTE, head_EV, targets_BT, weights_BT):
    def loss(x_BTE, head_EV):
        sums = token_sums(
            per_token, x_BTE, head_EV, targets_BT, weights_BT, vocab_size=vocab_size, chunk=chunk
        )
        return sums["loss"], sums

    gradients, sums = jax.grad(loss, (0, 1), has_aux=True)(x_BTE, head_EV)
    return sums, gradients


def assert_close(made, expected):
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(
    ("vocab_size", "padded", "chunk"),
    [(257, 384, 0), (257, 384, 7), (257, 257, 8), (50257, 50304, 4)],
)
def test_values_and_gradients_are_those_of_the_plain_one(sizes, vocab_size, padded, chunk):
    options = OPTIONS | {"vocab_size": vocab_size}
    per_token = PerToken("cross_entropy", ("accuracy",), tuple(options.items()))
    data = arrays(vocab_size, padded)
    expected = plain(options, vocab_size, *data)
    with rules_on(sizes).active():
        made = jax.jit(functools.partial(chunked, per_token, vocab_size, chunk))(*data)
        sums = jax.jit(
            functools.partial(token_sums, per_token, vocab_size=vocab_size, chunk=chunk)
        )(*data)
    assert_close(made, expected)
    assert_close(sums, expected[0])


def test_the_loss_with_options_is_that_of_its_formula():
    x_BTE, head_EV, targets_BT, _ = arrays(257, 384)
    logits_BTV = np.asarray(logits_of(x_BTE, head_EV, 257))[..., :257].astype(np.float64)
    log_z_BT = np.log(np.exp(logits_BTV).sum(axis=-1))
    wanted_BTV = 0.1 / 257 + 0.9 * (np.arange(257) == targets_BT[..., None])
    expected = ((log_z_BT[..., None] - logits_BTV) * wanted_BTV).sum(axis=-1) + 1e-2 * log_z_BT**2
    made = cross_entropy(logits_of(x_BTE, head_EV, 257), targets_BT, vocab_size=257, **OPTIONS)
    np.testing.assert_allclose(made, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "size"),
    [(64, 32000, 64), (8192, 32000, 2048), (8192, 131072, 512), (8209, 50304, 1280), (9, 2**27, 1)],
)
def test_an_automatic_chunk_holds_at_most_256_mib_of_logits(tokens, vocabulary, size):
    assert automatic_chunk(tokens, vocabulary) == size


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=["fsdp", "tensor"])
def test_no_logits_of_all_tokens_are_in_a_compiled_step(mesh, tmp_path):
    """A vocabulary of 128k: the logits of a device's tokens would take 4 GiB, or 1 of a part of it. What is
    as wide is no larger than the head's weights."""
    rows = 4 * mesh["fsdp"]
    config = tiny_config(
        model={"vocab_size": 2**17, "embed": 512, "layers": 2, "heads": 8, "kv_heads": 8}
        | {"head_dim": 64, "mlp": 1024},
        data={"batch_size": rows, "sequence_length": 2048},
        precision={"compute": "bfloat16"},
        mesh=mesh,
    ).to_dict()
    request = CompileRequest(config, "v3-8", 8, VOCABULARY, "train", 1000)
    (result,) = compile_all([request], directory=str(tmp_path))
    assert result.fits, result.error + result.message
    part = 2**17 // mesh.get("tensor", 1)
    shapes = [
        shape
        for computation in parse_hlo(read_hlo(result)).computations.values()
        for instruction in computation.instructions
        for shape in instruction.shape.leaves
    ]
    assert any(part in shape.dims for shape in shapes)
    assert not [s for s in shapes if part in s.dims and s.num_elements > 512 * part]
