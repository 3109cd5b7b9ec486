"""Memory over the schedule: each rule of sharing on a module of a few MiB, one real program."""

import contextlib
import os
import re

import pytest
from jax.experimental import topologies

from jaxtpu.config import finalize, run_units
from jaxtpu.mesh import make_mesh
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.liveness import timeline
from jaxtpu.train.programs import build_programs
from tests.plan.snippets import ARRAY, MIB, TWO, computation, module
from tests.tiny import VOCABULARY, tiny_config

DONATED = "input_output_alias={ {}: (0, {}, may-alias) }"
NOTE = ', backend_config={"aliasing_operands":{"lists":[{"indices":["0","1"]}]}}'
HOST = ARRAY.replace(")}", ")S(5)}")
VMEM = ARRAY.replace(")}", ")S(1)}")
START = f"%p = {ARRAY} parameter(0)\n"


def peak(entry: str, head: str = "", computations: str = "", **options) -> float:
    """The peak of a module of arrays of one MiB, MiB."""
    return timeline(module(entry, head, computations), **options).peak_bytes / MIB


def test_a_parameter_that_is_not_donated_stays():
    text = f"{START}%a = {ARRAY} negate(%p)\n%b = {ARRAY} negate(%a)\nROOT %c = {ARRAY} negate(%b)"
    made = timeline(module(text))
    # The parameter and the result throughout, beside them one temporary, two while %b is made.
    assert [event.bytes / MIB for event in made.events] == [2, 3, 4, 3]
    assert made.peak_index == 2
    assert [b.kind for b in made.peak_buffers] == ["parameter", "temporary", "temporary", "output"]


def test_a_donated_parameter_holds_the_result():
    text = f"{START}%a = {ARRAY} negate(%p)\nROOT %b = {ARRAY} negate(%a)"
    assert peak(text) == 3
    assert peak(text, DONATED) == 2


def test_a_result_takes_a_dead_operand_where_the_compiler_says_so():
    chain = f"{START}%a = {ARRAY} negate(%p)\n%b = {ARRAY} negate(%a)NOTE\n"
    dead = f"{chain}ROOT %c = {ARRAY} negate(%b)"
    assert peak(dead.replace("NOTE", ""), DONATED) == 3
    assert peak(dead.replace("NOTE", NOTE), DONATED) == 2
    needed = f"{chain}ROOT %c = {ARRAY} add(%a, %b)"
    assert peak(needed.replace("NOTE", NOTE), DONATED) == 3


def test_bitcasts_tuples_and_barriers_take_no_memory():
    text = f"""{START}%a = {ARRAY} negate(%p)
        %t = {TWO} tuple(%p, %a)
        %o = {TWO} optimization-barrier(%t)
        %g = {ARRAY} get-tuple-element(%o), index=1
        %v = {ARRAY} bitcast(%g)
        ROOT %c = {ARRAY} negate(%v)"""
    assert peak(text, DONATED) == 2


UPDATE = "dynamic-update-slice(%a, %p, %i)"
FUSED_UPDATE = f"""%x = {ARRAY} parameter(0)
    %y = {ARRAY} parameter(1)
    %i.1 = s32[]{{:S(6)}} constant(0)
    %v = {ARRAY} bitcast(%x)
    %u = {ARRAY} dynamic-update-slice(%v, %y, %i.1)
    ROOT %r = {ARRAY} bitcast(%u)"""


@pytest.mark.parametrize("update", [UPDATE, "fusion(%a, %p), kind=kLoop, calls=%fused"])
def test_an_update_is_in_place_even_where_nothing_says_so(update):
    text = f"""{START}%i = s32[]{{:S(6)}} constant(0)
        %a = {ARRAY} custom-call(), custom_call_target="AllocateBuffer"
        %b = {ARRAY} {update}
        ROOT %c = {ARRAY} negate(%b)"""
    assert peak(text, DONATED, computation("fused", FUSED_UPDATE)) == 2


def test_results_tied_to_operands():
    text = f"""{START}%a = {ARRAY} negate(%p)
        %f = {TWO} custom-call(%p, %a), custom_call_target="x", output_to_operand_aliasing={{{{1}}: (1, {{}})}}
        %g = {ARRAY} get-tuple-element(%f), index=1
        ROOT %c = {ARRAY} add(%g, %a)"""
    assert peak(text, DONATED) == 3  # the parameter, %a which is also %g, the other result


def loop(body: str, after: str = "ROOT %c = {} negate(%r)", carry: str = TWO) -> str:
    """An entry computation that carries %p and an allocated buffer through a loop of `body`."""
    return f"""{START}%a = {ARRAY} custom-call(), custom_call_target="AllocateBuffer"
        %t = {carry} tuple(%p, %a)
        %w = {carry} while(%t), condition=%cond, body=%body
        %r = {ARRAY} get-tuple-element(%w), index=1
        {after.format(ARRAY)}"""


def bodies(body: str) -> str:
    """The loop's condition and its body, which starts with %x and %y."""
    start = f"%q = {TWO} parameter(0)\n%x = {ARRAY} get-tuple-element(%q), index=0\n"
    start += f"%y = {ARRAY} get-tuple-element(%q), index=1\n"
    condition = f"%q = {TWO} parameter(0)\nROOT %k = pred[]{{:S(6)}} constant(true)"
    return computation("cond", condition) + computation("body", start + body)


def test_a_loop_carries_in_place_and_adds_its_own_peak():
    body = f"""%d = {ARRAY} negate(%x)
        %e = {ARRAY} negate(%d)
        %u = {ARRAY} dynamic-update-slice(%y, %e, %y)
        ROOT %n = {TWO} tuple(%x, %u)"""
    made = timeline(module(loop(body), DONATED, bodies(body)))
    assert made.peak_bytes == 4 * MIB  # both carries, %d and %e
    assert made.events[made.peak_index].instruction == "e"
    (span,) = made.loops
    inside = [event.instruction for event in made.events if event.loops == ("w",)]
    assert inside == [event.instruction for event in made.events[span.first : span.last + 1]]
    assert inside[-4:] == ["d", "e", "u", "n"] and span.trips is None


def test_a_carry_that_is_made_anew_leaves_a_hole():
    body = f"""%d = {ARRAY} negate(%y)
        %e = {ARRAY} negate(%d)
        %z = {ARRAY} negate(%e)
        ROOT %n = {TWO} tuple(%x, %z)"""
    made = timeline(module(loop(body), DONATED, bodies(body)))
    # %y is dead when %e is made: the parameter, %d and %e.
    assert made.peak_bytes == 3 * MIB


def test_branches_run_one_at_a_time():
    one = f"%x = {ARRAY} parameter(0)\nROOT %y = {ARRAY} negate(%x)"
    two = f"%v = {ARRAY} parameter(0)\n%w = {ARRAY} negate(%v)\nROOT %z = {ARRAY} negate(%w)"
    text = f"""{START}%i = s32[]{{:S(6)}} constant(0)
        ROOT %c = {ARRAY} conditional(%i, %p, %p), branch_computations={{%one, %two}}"""
    computations = computation("one", one) + computation("two", two)
    assert peak(text, "", computations) == 3  # parameter, result, %w


def test_a_call_is_walked_in_place():
    inner = f"%x = {ARRAY} parameter(0)\n%y = {ARRAY} negate(%x)\nROOT %z = {ARRAY} negate(%y)"
    text = f"{START}ROOT %c = {ARRAY} call(%p), to_apply=%inner"
    assert peak(text, "", computation("inner", inner)) == 3


def test_asynchronous_operations_hold_their_operand_and_their_result():
    text = f"""{START}%a = {ARRAY} negate(%p)
        %s = ({ARRAY}, {ARRAY}, u32[]{{:S(2)}}) collective-permute-start(%a)
        %b = {ARRAY} negate(%p)
        %d = {ARRAY} collective-permute-done(%s)
        %e = {ARRAY} add(%d, %b)
        ROOT %c = {ARRAY} negate(%e)"""
    made = timeline(module(text, DONATED))
    assert [event.bytes / MIB for event in made.events] == [1, 2, 3, 4, 4, 4, 2]
    assert "collective" in [buffer.kind for buffer in made.peak_buffers]


def test_copies_to_the_chip_and_to_the_host():
    text = f"""{START}%s = ({VMEM}, {ARRAY}, u32[]{{:S(2)}}) copy-start(%p)
        %v = {VMEM} copy-done(%s)
        %t = ({HOST}, {VMEM}, u32[]{{:S(2)}}) copy-start(%v)
        %h = {HOST} copy-done(%t)
        ROOT %c = {ARRAY} negate(%v)"""
    made = timeline(module(text))
    assert made.peak_bytes == 2 * MIB  # parameter and result
    assert made.peak_host_bytes == MIB
    assert [event.host_bytes for event in made.events] == [0, 0, 0, MIB, MIB, 0]


def test_code_is_live_throughout():
    text = f"{START}ROOT %a = {ARRAY} negate(%p)"
    made = timeline(module(text), code_bytes=5)
    assert made.peak_bytes == 2 * MIB + 5
    assert {event.bytes for event in made.events} == {2 * MIB + 5}
    assert sum(buffer.bytes for buffer in made.peak_buffers) == made.peak_bytes


def test_temporaries_in_a_result_that_is_not_made_yet():
    text = f"""{START}%a = {ARRAY} negate(%p)
        %b = {ARRAY} negate(%a)
        ROOT %c = {ARRAY} negate(%b)"""
    assert peak(text) == 4  # parameter, result, %a and %b
    assert peak(text, outputs_reused=True) == 3  # %a lies where %c will be


def test_padding_is_reported():
    wide = "f32[256,1]{1,0:T(8,128)}"
    made = timeline(module(f"%p = {wide} parameter(0)\nROOT %a = {wide} negate(%p)", DONATED))
    (buffer,) = made.peak_buffers
    assert (buffer.bytes, buffer.untiled_bytes, buffer.dims) == (256 * 512, 1024, (256, 1))


BIG, HALF = "f32[512,1024]{1,0:T(8,128)}", "bf16[512,1024]{1,0:T(8,128)(2,1)}"


def test_names_and_kinds_of_a_train_step():
    name = lambda path: f', metadata={{op_name="jit(f)/{path}" stack_frame_id=0}}'  # noqa: E731
    text = f"""%p = {BIG} parameter(0), metadata={{op_name="state.params[\\'mlp\\'][\\'kernel\\']"}}
        %x = {ARRAY} parameter(1), metadata={{op_name="batch[\\'inputs\\']"}}
        %w = {HALF} convert(%p){name("jvp(net)/mlp/convert_element_type")}
        %g = {BIG} all-gather(%x){name("jvp(net)/while/body/closed_call/mlp/gather")}
        %a = {ARRAY} fusion(%g, %w), kind=kLoop, calls=%fused{name("jvp(net)/mlp/gate/dot_general")}
        %y = {ARRAY} negate(%a){name("jvp(net)/norm/neg")}
        %z = {ARRAY} add(%y, %a){name("transpose(jvp(net))/norm/add")}
        %d = {BIG} fusion(%z, %a, %w), kind=kLoop, calls=%fused{name("transpose(jvp(net))/mlp/dot")}
        ROOT %u = {BIG} add(%p, %d){name("add")}"""
    made = timeline(module(text, DONATED, computation("fused", "ROOT %r = f32[] constant(0)")))
    events = {event.instruction: event for event in made.events}
    phases = {name: event.phase for name, event in events.items()}
    assert phases == dict.fromkeys("px", "other") | dict.fromkeys(
        "wgay", "forward"
    ) | dict.fromkeys("zd", "backward") | {"u": "other"}
    assert events["a"].path == "mlp/gate" and events["g"].path == "mlp"
    found = {b.instruction: (b.kind, b.phase, b.path) for b in made.peak_buffers}
    assert events["d"].bytes == made.peak_bytes == 8 * MIB
    assert found == {
        "p": ("parameter", "other", "params/mlp/kernel"),
        "x": ("parameter", "other", "batch/inputs"),
        "w": ("weight copy", "forward", "params/mlp/kernel"),
        "a": ("saved activation", "forward", "mlp/gate"),
        "z": ("temporary", "backward", "norm"),
        "d": ("gradient", "backward", "params/mlp/kernel"),
    }


@contextlib.contextmanager
def quiet():
    """Hides what libtpu writes to standard error while it starts."""
    kept, hidden = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(hidden, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(hidden)


@pytest.fixture(scope="module")
def compiled():
    """The tiny train step, compiled for a v3-8 with no TPU."""
    pytest.importorskip("libtpu")
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    config = tiny_config()
    config.mesh.update({"data": 1, "fsdp": 4, "tensor": 2})
    sizes = finalize(config, 8, VOCABULARY)
    with quiet():
        devices = topologies.get_topology_desc("v3:2x2", platform="tpu").devices
        programs = build_programs(config, make_mesh(sizes, devices), run_units(config, 1000))
        step = programs.train_step.lower(programs.abstract_state, programs.abstract_batch)
        return step.compile()


@pytest.mark.tpu_compile
def test_the_peak_is_the_compilers(compiled):
    stats = compiled.memory_analysis()
    old = not hasattr(stats, "total_allocation_bytes")
    made = timeline(parse_hlo(compiled.as_text()), outputs_reused=old)
    # Within 3%, and the program is so small that 16 KiB of constants and scalars matter more.
    slack = max(0.03 * stats.peak_memory_in_bytes, 16 * 1024)
    assert abs(made.peak_bytes - stats.peak_memory_in_bytes) < slack
    assert sum(buffer.bytes for buffer in made.peak_buffers) == made.peak_bytes


@pytest.mark.tpu_compile
def test_a_real_step_is_named(compiled):
    program = parse_hlo(compiled.as_text())
    made = timeline(program)
    assert {event.phase for event in made.events} == {"forward", "backward", "other"}
    assert {loop.trips for loop in made.loops} == {3}
    assert {"forward", "backward"} <= {loop.phase for loop in made.loops}
    assert "decoder/layers/mlp/gate" in {event.path for event in made.events}
    kinds = {buffer.kind for buffer in made.peak_buffers}
    assert {"parameter", "gradient", "temporary"} <= kinds
    paths = {buffer.path for buffer in made.peak_buffers if buffer.kind == "parameter"}
    assert "params/decoder/layers/mlp/gate/kernel" in paths
    sources = {buffer.source for buffer in made.peak_buffers if buffer.kind == "temporary"}
    assert any(re.search(r"jaxtpu/models/transformer.py:\d+", source) for source in sources)
