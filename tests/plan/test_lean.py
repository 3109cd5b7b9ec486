"""What makes a train step need less HBM, as the TPU's own compiler says."""

import pytest

from jaxtpu.hardware import parse_slice
from jaxtpu.observe.memory import tree_bytes_per_device
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, read_hlo
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.timing import predict_time
from tests.tiny import VOCABULARY, programs_on, tiny_config

pytestmark = pytest.mark.tpu_compile
# More state than activations, in matrices that layers and rows divide.
LARGE = {"embed": 1024, "layers": 6, "heads": 8, "kv_heads": 8, "head_dim": 128, "mlp": 4096}
# More activations than state.
WIDE = {"embed": 256, "layers": 4, "heads": 4, "kv_heads": 4, "head_dim": 64, "mlp": 4096}
MIB = 2**20


def compiled(*variants: dict) -> list[CompileResult]:
    """The train steps of the variants on a v3-8, all of which fit into 8 GiB."""
    requests = [
        CompileRequest(tiny_config(**sections).to_dict(), "v3-8", 8.0, VOCABULARY)
        for sections in variants
    ]
    results = compile_all(requests)
    assert all(result.fits for result in results), [result.error for result in results]
    return results


def test_state_on_the_host_leaves_the_hbm_to_the_rest():
    model, data = LARGE | {"vocab_size": 8192}, {"batch_size": 8, "sequence_length": 256}
    sections = {"model": model, "data": data}
    state = programs_on({"fsdp": 8}, **sections).abstract_state.opt_state
    far = {"placement": "host"}
    here, there, master = compiled(
        sections,
        sections | {"optimizer": far},
        sections | {"optimizer": far | {"rounding": "master"}, "precision": {"params": "bfloat16"}},
    )
    size = tree_bytes_per_device(state)
    assert here.host_bytes == 0
    assert there.host_bytes == pytest.approx(size, rel=0.01)
    assert here.hbm_bytes - there.hbm_bytes > 0.9 * size
    assert master.host_bytes == pytest.approx(1.5 * size, rel=0.01)
    assert there.hbm_bytes - master.hbm_bytes > 0.25 * size  # half the parameters


def test_microbatches_need_less_memory_for_the_same_batch():
    sections = {"model": WIDE, "data": {"batch_size": 64, "sequence_length": 512}}
    one, four = compiled(sections, sections | {"train": {"microbatches": 4}})
    assert four.hbm_bytes < 0.5 * one.hbm_bytes


def test_slices_exchange_gradients_once_however_many_microbatches():
    """Accumulated, they are float32; of one microbatch they are bfloat16."""
    sections = {"model": LARGE, "data": {"batch_size": 128, "sequence_length": 128}}
    sections |= {"mesh": {"data": 2, "fsdp": 8}, "precision": {"compute": "bfloat16"}}
    two, eight = (
        communication(sections | {"train": {"microbatches": number}}, "2xv3-8")["dcn"]
        for number in (2, 8)
    )
    size = tree_bytes_per_device(programs_on({"fsdp": 8}, model=LARGE).abstract_state.params)
    assert size < two[1] < 1.6 * size  # the embedding's rows come on top
    assert eight[1] < 1.1 * two[1]


def test_the_residual_stream_is_divided_over_tensor_between_layers():
    model = WIDE | {"layers": 12, "mlp": 512}
    sections = {"model": model, "data": {"batch_size": 32, "sequence_length": 1024}}
    sections |= {"mesh": {"fsdp": 2, "tensor": 4}}
    divided, whole = compiled(sections, sections | {"sharding": {"residual": "context"}})
    kept = 12 * 16 * 1024 * 256 * 4  # of each layer its input: float32, half of the batch
    assert whole.hbm_bytes - divided.hbm_bytes > 0.5 * kept


def communication(sections: dict, slice_name: str) -> dict:
    """(runs, bytes) of each kind of collective of a train step."""
    request = CompileRequest(tiny_config(**sections).to_dict(), slice_name, 8.0, VOCABULARY)
    (result,) = compile_all([request])
    assert result.fits, result.error or result.message
    return predict_time(parse_hlo(read_hlo(result)), parse_slice(slice_name)).communication


def test_lean_state_needs_less_memory():
    sections = {"model": LARGE, "data": {"batch_size": 8, "sequence_length": 256}}
    adamw, half, muon, adafactor = compiled(
        sections,
        sections | {"optimizer": {"moments": "bfloat16"}},
        sections | {"optimizer": {"name": "muon", "moments": "bfloat16"}},
        sections
        | {
            "optimizer": {"name": "adafactor", "rounding": "stochastic"},
            "precision": {"params": "bfloat16"},
        },
    )
    assert adafactor.hbm_bytes < muon.hbm_bytes < half.hbm_bytes < adamw.hbm_bytes
