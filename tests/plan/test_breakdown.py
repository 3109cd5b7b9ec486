"""What memory is for: parts that add up, on modules of a few MiB and on a compiled train step."""

import dataclasses
import json

import pytest

from jaxtpu.plan import breakdown as parts
from jaxtpu.plan.breakdown import breakdown, explain_memory, largest, moment, padded
from jaxtpu.plan.compile_cache import CompileResult, store_hlo
from jaxtpu.plan.compiler import CompileRequest, compile_all
from jaxtpu.plan.liveness import Loop, timeline
from tests.plan.snippets import MIB, computation, module
from tests.tiny import VOCABULARY, tiny_config

NARROW = "f32[2048,64]{1,0:T(8,128)}"  # one MiB, half of it padding
WEIGHT = "f32[256,1024]{1,0:T(8,128)}"  # one MiB
WHOLE = "f32[1024,1024]{1,0:T(8,128)}"  # of four devices
LOGITS = "f32[512,1024]{1,0:T(8,128)}"  # two MiB; the vocabulary is 1024
DONATED = "input_output_alias={ {}: (0, {}, may-alias) }"


def meta(path: str) -> str:
    return f', metadata={{op_name="{path}" stack_frame_id=0}}'


def parameters(*names: str) -> str:
    """One MiB each, named as leaves of the state and the batch."""
    return "\n".join(f"%p{i} = {WEIGHT} parameter({i}){meta(name)}" for i, name in enumerate(names))


STATE = parameters(
    "state.params[\\'head\\'][\\'kernel\\']",
    "state.opt_state[1].mu[\\'head\\'][\\'kernel\\']",
    "batch[\\'weights\\']",
)
STEP = f"""{STATE}
    %w = {WHOLE} all-gather(%p0){meta("jit(step)/jvp(net)/head/convert_element_type")}
    %a = {NARROW} exponential(%p2){meta("jit(step)/jvp(net)/mlp/gate/exp")}
    %s = {WEIGHT} negate(%p2){meta("jit(step)/jvp(net)/attention/neg")}
    %l = {LOGITS} fusion(%w, %a), kind=kLoop, calls=%fused{meta("jit(step)/jvp(net)/head/dot_general")}
    %g = {WEIGHT} fusion(%l, %w, %a, %s), kind=kLoop, calls=%fused{meta("jit(step)/transpose(jvp(net))/head/dot")}
    ROOT %u = {WEIGHT} add(%p0, %g){meta("jit(step)/add")}"""
FUSED = computation("fused", "ROOT %r = f32[] exponential()")


def step():
    """The timeline of a step with one weight, which its loss reads gathered from four devices."""
    return timeline(module(STEP, DONATED, FUSED))


def test_the_parts_add_up_to_the_compilers_total():
    made = step()
    found = breakdown(made, made.peak_bytes + 500_000, made.peak_bytes + 300_000)
    assert tuple(found) == parts.PARTS
    assert sum(found.values()) == made.peak_bytes + 500_000
    assert found.pop(parts.HOLES) == 200_000 and found.pop(parts.UNEXPLAINED) == 300_000
    assert {name: size / MIB for name, size in found.items() if size} == {
        parts.PARAMETERS: 1,
        parts.OPTIMIZER: 1,
        parts.BATCH: 1,
        parts.GRADIENTS: 1,
        parts.ACTIVATIONS: 1.5,  # two, of which one is half padding
        parts.LOGITS: 2,
        parts.WEIGHT_COPIES: 4,
        parts.PADDING: 0.5,
    }
    assert breakdown(made, MIB, MIB)[parts.UNEXPLAINED] == MIB - made.peak_bytes


def test_tensors_in_words():
    words = [tensor.words for tensor in largest(step(), 8)]
    assert words[:2] == [
        "4 MiB f32[1024,1024] weight copy, head/kernel, forward",
        "2 MiB f32[512,1024] logits and loss, head, forward",
    ]
    assert set(words[2:]) == {
        "1 MiB f32[256,1024] parameter, head/kernel",
        "1 MiB f32[256,1024] optimizer state, opt_state/1/mu/head/kernel",
        "1 MiB f32[256,1024] batch, batch/weights",
        "1 MiB f32[2048,64] saved activation, mlp/gate, forward",
        "1 MiB f32[256,1024] saved activation, attention, forward",
        "1 MiB f32[256,1024] gradient, head/kernel, backward",
    }


def test_what_loses_memory_to_tiles():
    (tensor,) = padded(step())
    assert (tensor.array, tensor.path, tensor.lost_bytes) == ("f32[2048,64]", "mlp/gate", MIB / 2)


def test_moments_and_amounts():
    made = step()
    peak = made.events[made.peak_index]
    assert moment(made, peak) == "backward, head"
    loop = Loop("while.1", "decoder", "forward", 3, 5, 24)
    around = Loop("while.0", "", "other", 3, 8, None)
    events = [dataclasses.replace(event, loops=("while.0",)) for event in made.events]
    for index, path in ((3, "decoder"), (4, "decoder/layers/mlp"), (5, "decoder/layers/norm")):
        loops = ("while.0", "while.1")
        events[index] = dataclasses.replace(events[index], path=path, loops=loops)
    made = dataclasses.replace(made, events=tuple(events), loops=(around, loop))
    assert (
        moment(made, events[4])
        == "forward, decoder/layers/mlp, in decoder/layers x 24 in microbatches x ?"
    )
    sizes = (0, 900, 12_345, 384 * MIB, 1000 * MIB, 1.5 * 2**30, 100.4 * 2**30, -300 * MIB)
    assert [parts.amount(size) for size in sizes] == [
        "0 B", "900 B", "12.1 KiB", "384 MiB", "1000 MiB", "1.5 GiB", "100 GiB", "-300 MiB",
    ]  # fmt: skip


def test_a_report_as_json(tmp_path):
    text = f"%p0 = {WEIGHT} parameter(0)\nROOT %a = {WEIGHT} negate(%p0)"
    text = (
        f"HloModule jit_f, is_scheduled=true\n\nENTRY %main (p: f32[1]) -> f32[1] {{\n{text}\n}}\n"
    )
    result = CompileResult(
        fits=True,
        hbm_bytes=2 * MIB + 768,
        peak_bytes=2 * MIB + 512,
        code_bytes=4096,
        hlo_path=store_hlo(
            tmp_path, "k", text.replace("\n%", "\n  %").replace("\nROOT", "\n  ROOT")
        ),
        versions={"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.50.1"},
    )
    values = json.loads(json.dumps(explain_memory(result).to_json()))
    assert "timeline" not in values
    assert values["parts"][parts.PARAMETERS] == values["parts"][parts.RESULTS] == MIB
    assert values["code_bytes"] == 4096 and values["peak_bytes"] == 2 * MIB
    assert values["unexplained_fraction"] == 512 / (2 * MIB + 768)
    assert values["parts"][parts.HOLES] == 256
    assert values["largest"][0]["words"].startswith("1 MiB f32[256,1024] ")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Train steps whose peak is in the loss: of a head, and of a tied embedding."""
    requests = []
    for tied in (False, True):
        config = tiny_config()
        config.mesh.update({"data": 1, "fsdp": 8, "tensor": 1})
        config.model.update(
            {"embed": 128, "heads": 1, "kv_heads": 1, "head_dim": 128, "vocab_size": 16384}
        )
        config.model.update({"remat": "full", "tied_embeddings": tied, "attention": "xla"})
        config.precision.compute = "bfloat16"
        config.data.update({"batch_size": 64, "sequence_length": 256})
        requests.append(CompileRequest(config.to_dict(), "v3-8", 8, VOCABULARY))
    folder = str(tmp_path_factory.mktemp("plans"))
    return compile_all(requests, workers=1, directory=folder)


@pytest.mark.tpu_compile
def test_a_compiled_step_is_explained(compiled):
    for result in compiled:
        report = explain_memory(result)
        assert sum(report.parts.values()) == report.hbm_bytes == result.hbm_bytes
        assert report.parts[parts.HOLES] >= 0
        assert abs(report.unexplained_fraction) < 0.002
        logits = 8 * 256 * 16384 * 2  # a device's, bfloat16 at least
        assert report.parts[parts.LOGITS] >= logits
        assert report.largest[0].part == parts.LOGITS and 16384 in report.largest[0].dims
        held = report.parts[parts.PARAMETERS]
        assert 1.99 < report.parts[parts.OPTIMIZER] / held < 2.01  # two moments
        assert report.parts[parts.BATCH] == 5 * 8 * 256 * 4
        assert report.parts[parts.WEIGHT_COPIES] > 0
        assert "forward" in report.peak_at or "backward" in report.peak_at
