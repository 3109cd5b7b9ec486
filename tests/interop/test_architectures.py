"""Each architecture against `transformers`: logits, every gradient, and back again bit for bit."""

import jax
import numpy as np
import pytest

from jaxtpu.interop.folder import HuggingFaceFolder
from jaxtpu.interop.read import read_params
from jaxtpu.interop.write import parameter_arrays, write_folder
from jaxtpu.kernels.cross_entropy import cross_entropy
from tests.interop.models import CASES, numpy_of, reference, save, torch
from tests.tiny import programs_on

BATCH, LENGTH = 4, 20
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def ours(folder, vocabulary: int):
    """(config of the model, programs, parameters) of a folder, on the mesh."""
    model_fields = HuggingFaceFolder(str(folder)).model_fields()
    programs, config = programs_on(
        MESH, with_config=True, model=model_fields, vocabulary=vocabulary,
        data={"batch_size": BATCH, "sequence_length": LENGTH},
        sharding={"max_replicated": 1.0},
    )  # fmt: skip
    shardings = jax.tree.map(lambda p: p.sharding, programs.abstract_state.params)
    params = read_params(HuggingFaceFolder(str(folder)), config.model, programs.model, shardings)
    return config.model, programs, params


def batch_of(vocabulary: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, vocabulary, (BATCH, LENGTH + 1)).astype(np.int32)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((BATCH, LENGTH), np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH)),
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_the_way_back(name, tmp_path):
    theirs = reference(name)
    folder = save(theirs, tmp_path / "theirs")
    vocabulary = theirs.config.vocab_size
    config, programs, params = ours(folder, vocabulary)
    batch = batch_of(vocabulary)

    def loss(params):
        with programs.rules.active():
            logits = programs.model.apply(params, batch)
            return cross_entropy(logits, batch["targets"]).mean(), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    theirs.zero_grad()
    expected = theirs(torch.from_numpy(batch["inputs"].astype(np.int64))).logits
    np.testing.assert_allclose(
        np.asarray(logits)[..., :vocabulary], numpy_of(expected), rtol=1e-4, atol=1e-4
    )
    targets = torch.from_numpy(batch["targets"].astype(np.int64))
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    by_name = dict(theirs.named_parameters())
    compared = 0
    for key, made in parameter_arrays(config, programs.model, gradient):
        grad = numpy_of(by_name[key].grad)
        scale = max(np.abs(grad).max(), 1e-6)
        np.testing.assert_allclose(made / scale, grad / scale, rtol=1e-3, atol=1e-4, err_msg=key)
        compared += 1
    assert compared == len(by_name)

    write_folder(tmp_path / "ours", config, programs.model, params, "float32", file_bytes=50_000)
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    kept = ("torch_dtype", "dtype", "_attn_implementation", "transformers_version")
    before, after = (
        {k: v for k, v in m.config.to_dict().items() if k not in kept} for m in (theirs, again)
    )
    for key in ("rope_parameters", "sliding_window", "layer_types", "hidden_act", "vocab_size",
                "tie_word_embeddings", "num_key_value_heads", "head_dim"):  # fmt: skip
        assert before.get(key) in (None, after.get(key)), key
