"""Names and kinds that are read off more than the instruction that makes a buffer."""

from jaxtpu.plan.liveness import Buffer, timeline
from tests.plan.snippets import computation, module

STACK = "f32[24,256,1024]{2,1,0:T(8,128)}"
SLICE = "f32[256,1024]{1,0:T(8,128)}"
WHOLE = "f32[1024,1024]{1,0:T(8,128)}"
FUSED = """%x = f32[24,256,1024]{2,1,0} parameter(0)
    %i.1 = s32[]{:S(6)} parameter(1)
    %y = f32[1,256,1024]{2,1,0} dynamic-slice(%x, %i.1), dynamic_slice_sizes={1,256,1024}
    ROOT %z = f32[256,1024]{1,0} bitcast(%y)"""


KERNEL = "state.params[\\'mlp\\'][\\'kernel\\']"  # as the HLO text escapes it


def meta(path: str) -> str:
    return f', metadata={{op_name="{path}" stack_frame_id=0}}'


def at_peak(text: str, computations: str = "") -> tuple[Buffer, ...]:
    """Buffers at the peak."""
    return timeline(module(text, "", computations)).peak_buffers


def test_a_layer_of_a_stack_of_weights_and_what_is_gathered_from_it_are_copies():
    text = f"""%p = {STACK} parameter(0){meta(KERNEL)}
        %i = s32[]{{:S(6)}} constant(0)
        %s = {SLICE} fusion(%p, %i), kind=kLoop, calls=%fused
        %g = {WHOLE} all-gather(%s){meta("jit(step)/jvp(net)/mlp/convert_element_type")}
        %a = {WHOLE} add(%g, %g){meta("jit(step)/jvp(net)/mlp/add")}
        ROOT %r = {WHOLE} multiply(%a, %g){meta("jit(step)/jvp(net)/mlp/mul")}"""
    kinds = {b.instruction: b.kind for b in at_peak(text, computation("fused", FUSED))}
    assert kinds["g"] == "weight copy" and kinds["a"] == "temporary"


def test_a_gradient_of_a_whole_weight_before_it_is_summed_over_devices():
    text = f"""%p = {SLICE} parameter(0){meta(KERNEL)}
        %g = {WHOLE} all-gather(%p){meta("jit(step)/jvp(net)/mlp/convert_element_type")}
        %a = {WHOLE} add(%g, %g){meta("jit(step)/transpose(jvp(net))/mlp/add")}
        %d = {WHOLE} add(%a, %g){meta("jit(step)/transpose(jvp(net))/mlp/dot_general")}
        %r = {WHOLE} all-reduce(%d){meta("jit(step)/transpose(jvp(net))/mlp/dot_general")}
        ROOT %n = {WHOLE} negate(%r){meta("jit(step)/transpose(jvp(net))/mlp/neg")}"""
    kinds = {b.instruction: b.kind for b in at_peak(text)}
    assert (kinds["a"], kinds["d"]) == ("temporary", "gradient")


def test_a_stack_is_named_after_what_is_put_into_it():
    update = "jit(step)/jvp(net)/decoder/while/body/dynamic_update_slice"
    text = f"""%p = {SLICE} parameter(0), metadata={{op_name="batch"}}
        %i = s32[]{{:S(6)}} constant(0)
        %b = {STACK} custom-call(), custom_call_target="AllocateBuffer"
        %a = {SLICE} exponential(%p){meta("jit(step)/jvp(net)/decoder/layers/mlp/gate/exp")}
        %u = {STACK} dynamic-update-slice(%b, %a, %i){meta(update)}
        ROOT %r = {SLICE} fusion(%u), kind=kLoop, calls=%none{meta("jit(step)/transpose(jvp(net))/decoder/mul")}"""
    found = at_peak(text, computation("none", "ROOT %r.1 = f32[] exponential()"))
    (stack,) = (buffer for buffer in found if buffer.dims == (24, 256, 1024))
    assert (stack.kind, stack.path) == ("saved activation", "decoder/layers/mlp/gate")


def test_a_scalar_that_is_made_beside_a_stack_is_none():
    update = "jit(step)/jvp(net)/decoder/while/body/dynamic_update_slice"
    text = f"""%p = {SLICE} parameter(0), metadata={{op_name="batch"}}
        %f = ({STACK}, f32[]) fusion(%p), kind=kLoop, calls=%none{meta(update)}
        %u = {STACK} get-tuple-element(%f), index=0
        %s = f32[] get-tuple-element(%f), index=1
        ROOT %r = ({STACK}, f32[]) tuple(%u, %s)"""
    found = at_peak(text, computation("none", "ROOT %r.1 = f32[] exponential()"))
    assert any(buffer.dims == (24, 256, 1024) for buffer in found)


def test_a_buffer_without_a_name_takes_its_readers():
    text = f"""%p = {SLICE} parameter(0), metadata={{op_name="batch"}}
        %a = {SLICE} negate(%p)
        ROOT %r = {SLICE} negate(%a){meta("jit(step)/transpose(jvp(net))/attention/neg")}"""
    names = {(b.path, b.phase) for b in at_peak(text) if b.kind == "temporary"}
    assert names == {("attention", "backward")}
