"""The transformer against Llama in PyTorch, and what its parts promise."""

import jax
import numpy as np
import pytest

from jaxtpu.kernels.cross_entropy import cross_entropy
from tests.tiny import LENGTH, VOCABULARY, fixed_batch, programs_on, put, tiny_config

torch = pytest.importorskip("torch", reason="tests/requirements.txt is not installed")
transformers = pytest.importorskip("transformers")


def llama(tied: bool):
    model = tiny_config().model
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=model.embed,
        intermediate_size=model.mlp,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.norm_epsilon,
        rope_theta=model.rope_theta,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval()


def copy_weights(params, reference) -> None:
    """Our parameters into the PyTorch model, in its own layout ([outputs, inputs] matrices)."""

    def assign(weight, array, shape):
        weight.data.copy_(torch.from_numpy(np.ascontiguousarray(np.reshape(array, shape).T)))

    embed = params["embedding"]["table"].shape[1]
    reference.model.embed_tokens.weight.data.copy_(
        torch.from_numpy(params["embedding"]["table"][:VOCABULARY].copy())
    )
    if "head" in params:
        assign(reference.lm_head.weight, params["head"]["kernel"][:, :VOCABULARY], (embed, -1))
    reference.model.norm.weight.data.copy_(
        torch.from_numpy(params["decoder"]["final_norm"]["scale"].copy())
    )
    layers = params["decoder"]["layers"]
    for i, layer in enumerate(reference.model.layers):
        attention, mlp = layers["attention"], layers["mlp"]
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            kernel = attention[ours]["kernel"][i]
            assign(getattr(layer.self_attn, theirs).weight, kernel, (embed, -1))
        assign(layer.self_attn.o_proj.weight, attention["out"]["kernel"][i], (-1, embed))
        for name in ("gate", "up", "down"):
            kernel = mlp[name]["kernel"][i]
            assign(getattr(layer.mlp, f"{name}_proj").weight, kernel, kernel.shape)
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            scale = torch.from_numpy(layers[ours]["scale"][i].copy())
            getattr(layer, theirs).weight.data.copy_(scale)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_and_gradients_are_those_of_llama(tied):
    programs = programs_on({"data": 2, "fsdp": 2, "tensor": 2}, model={"tied_embeddings": tied})
    batch = fixed_batch(padding=False)
    batch["segment_ids"] = np.ones_like(batch["segment_ids"])
    batch["positions"] = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), batch["inputs"].shape)
    params = programs.init().params
    random = np.random.default_rng(3)
    params = jax.tree.map(  # scales of exactly 1 would hide a scale that is not applied
        lambda p: jax.device_put(p + 0.1 * random.normal(size=p.shape).astype("f4"), p.sharding),
        params,
    )
    reference = llama(tied)
    copy_weights(jax.device_get(params), reference)
    tokens = torch.from_numpy(batch["inputs"].astype(np.int64))
    expected = reference(tokens).logits
    logits = np.asarray(jax.jit(programs.model.apply)(params, put(programs, batch)))
    np.testing.assert_allclose(
        logits[..., :VOCABULARY], expected.detach().numpy(), rtol=1e-4, atol=1e-4
    )
    targets = torch.from_numpy(batch["targets"].astype(np.int64))
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()

    def loss(params):
        with programs.rules.active():
            each = cross_entropy(programs.model.apply(params, batch), batch["targets"])
        return each.mean()

    gradient = jax.device_get(jax.jit(jax.grad(loss))(params))
    ours = gradient["decoder"]["layers"]["attention"]["key"]["kernel"][1]
    theirs = reference.model.layers[1].self_attn.k_proj.weight.grad.numpy().T
    np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-3, atol=1e-6)
    theirs = reference.model.embed_tokens.weight.grad.numpy()
    table = gradient["embedding"]["table"]
    np.testing.assert_allclose(table[:VOCABULARY], theirs, rtol=1e-3, atol=1e-6)
    if not tied:
        assert not table[VOCABULARY:].any()  # ids that only pad the vocabulary learn nothing


def test_operations_carry_the_path_of_their_parameters():
    programs = programs_on({"fsdp": 8})
    text = programs.train_step.lower(programs.abstract_state, programs.abstract_batch).as_text(
        debug_info=True
    )
    for path in programs.model.axes:
        if path.endswith("kernel") and "head" not in path:
            module = path.removesuffix("/kernel").split("/", 2)[-1]
            assert f"{module}/dot_general" in text, path
