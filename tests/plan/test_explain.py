"""Explanations, with the real compiler on a tiny model under a tiny budget."""

import io

import jax
import pytest
from rich.console import Console

from jaxtpu.hardware import parse_slice
from jaxtpu.plan import oom
from jaxtpu.plan.candidates import candidate_of
from jaxtpu.plan.command import without_mesh
from jaxtpu.plan.compiler import CompileRequest, compile_all
from jaxtpu.plan.explain import explain, show_explanation
from tests.tiny import VOCABULARY, tiny_config

GIB = 2**30


def wide_config():
    """Scores of 8 x 6 x 512 x 512 in every layer: remat=none keeps them all."""
    return tiny_config(
        model={"remat": "none", "attention": "xla"},
        data={"batch_size": 64, "sequence_length": 512},
        mesh={"fsdp": 8},
    )


@pytest.fixture(scope="module")
def explanation():
    config, slice_ = wide_config(), parse_slice("v3-8")
    ready, units = without_mesh(config, slice_, VOCABULARY)
    return explain(
        ready,
        candidate_of(config, slice_),
        slice_,
        units,
        hbm_gib=0.2,
        vocab_size=VOCABULARY,
        on_progress=lambda *_: None,
    )


class TestCompiled:
    pytestmark = pytest.mark.tpu_compile

    def test_the_largest_tensors_are_named(self, explanation):
        assert "all 16 GiB" in explanation.note
        assert explanation.memory.hbm_bytes > 0.2 * GIB
        words = explanation.memory.largest[0].words
        assert "saved activation" in words and "decoder" in words and ".py:" in words

    def test_changes_were_compiled_and_fit(self, explanation):
        assert 1 <= len(explanation.changes) <= 5
        speeds = [change.seconds_per_token for change in explanation.changes]
        assert speeds == sorted(speeds)
        for change in explanation.changes:
            assert change.fields and change.row.fits
            assert change.row.result.hbm_bytes <= 0.2 * GIB

    def test_a_change_pasted_into_the_config_fits(self, explanation):
        config = wide_config()
        config.update(explanation.changes[0].fields)
        request = CompileRequest(config.to_dict(), "v3-8", 0.2, VOCABULARY)
        (result,) = compile_all([request])
        assert result.fits

    def test_it_is_printed_in_words(self, explanation):
        out = Console(file=io.StringIO(), width=200)
        show_explanation(out, explanation, 0.2)
        text = out.file.getvalue()
        assert "Why fsdp 8, none, xla attention, 1 microbatch" in text
        assert "tokens/s predicted: --config." in text


def test_only_a_lack_of_memory_is_renamed():
    told = "out of memory in evaluation: RESOURCE_EX"
    with pytest.raises(oom.OutOfMemoryError, match=told), oom.naming("evaluation"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9G of 8G\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError), oom.naming("evaluation"):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")


def test_the_candidate_of_a_config_runs_as_the_config_says():
    config = wide_config()
    candidate = candidate_of(config, parse_slice("v3-8"))
    assert candidate.sizes == {"data": 1, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1}
    assert dict(candidate.knobs) == {
        "model.remat": "none",
        "model.remat_group": 1,
        "model.attention": "xla",
        "train.microbatches": 1,
        "optimizer.placement": "device",
    }
