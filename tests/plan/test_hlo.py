"""The HLO text: shapes with their tiling, instructions, sources, trip counts, errors."""

import time

import pytest

from jaxtpu.plan.hlo import HOST, VMEM, HloSyntaxError, TupleShape, parse_hlo, trip_count
from jaxtpu.plan.shapes import parse_shape
from tests.plan.snippets import ARRAY, computation, module


@pytest.mark.parametrize(
    ("text", "plain", "tiled"),
    [
        ("f32[24,256]{1,0:T(8,128)}", 24 * 256 * 4, 24 * 256 * 4),
        ("f32[3,130]{1,0:T(8,128)}", 3 * 130 * 4, 8 * 256 * 4),
        ("f32[3,130]{0,1:T(8,128)}", 3 * 130 * 4, 136 * 128 * 4),  # the minor one is of size 3
        ("f32[5,3,130]{2,0,1:T(8,128)}", 5 * 3 * 130 * 4, 3 * 8 * 256 * 4),
        ("bf16[9,128]{1,0:T(8,128)(2,1)}", 9 * 128 * 2, 16 * 128 * 2),
        ("bf16[2,100]{1,0:T(2,128)(2,1)}", 400, 512),
        ("pred[4,2048]{1,0:T(8,128)(4,1)}", 8192, 16384),
        ("pred[5]{0:T(1024)(128)(4,1)}", 5, 1024),
        ("f32[300]{0:T(256)}", 1200, 2048),
        ("s32[]{:T(256)}", 4, 1024),
        ("s32[]", 4, 4),
        ("s4[8,128]{1,0:T(8,128)(4,1)}", 1024, 1024),  # a byte each, unless the layout says E(4)
        ("s4[8,128]{1,0:T(8,128)(8,1)E(4)}", 512, 512),
        ("f8e4m3fn[8,128]{1,0:T(8,128)(4,1)}", 1024, 1024),
        ("c64[2]{0}", 16, 16),
        ("f32[6,5,128]{2,1,0:T(*,8,128)}", 6 * 5 * 128 * 4, 32 * 128 * 4),
        ("f32[0,128]{1,0:T(8,128)}", 0, 0),
        ("token[]", 0, 0),
    ],
)
def test_bytes_of_a_shape(text, plain, tiled):
    shape = parse_shape(text)
    assert (shape.bytes, shape.tiled_bytes) == (plain, tiled)


def test_memory_spaces_and_nested_tuples():
    shape = parse_shape(
        "((bf16[8,128]{1,0:T(8,128)(2,1)S(1)}), /*index=1*/f32[<=4]{0:T(256)S(5)}, u32[]{:S(2)}, ())"
    )
    assert isinstance(shape, TupleShape)
    assert [leaf.memory_space for leaf in shape.leaves] == [VMEM, HOST, 2]
    assert shape.num_elements == 1024 + 4 + 1
    assert shape.bytes == 2048 + 16 + 4


INSTRUCTION = (
    '%x.1 = (f32[8]{0:T(256)}, f32[8]{0:T(256)}) fusion(%p, /*index=1*/%p), kind=kLoop, '
    'output_to_operand_aliasing={{0}: (1, {}), {1}: (0, {2})}, calls=%inner, '
    'control-predecessors={%p}, metadata={op_name="jit(f)/a \\"b\\", {c}/mul" stack_frame_id=2}, '
    'backend_config={"note":"\\nRing{colors:4, (","window_config":{"estimated_cycles":"17169416"}}'
)  # fmt: skip
TABLES = """FileNames
1 "/site-packages/jax.py"
2 "/home/me/model.py"

FunctionNames
1 "Layer.__call__"

FileLocations
1 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=3 end_column=9}
2 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
"""


def test_everything_an_instruction_says():
    inner = computation("inner", "ROOT %t = (f32[8]{0:T(256)}, f32[8]{0:T(256)}) tuple()")
    text = f"%p = f32[8]{{0:T(256)}} parameter(0)\nROOT {INSTRUCTION}"
    made = module(text, "input_output_alias={ {0}: (0, {}, may-alias) }", f"{TABLES}\n{inner}")
    root = made.entry.root
    assert (root.name, root.opcode, root.operands, root.called) == (
        "x.1",
        "fusion",
        ("p", "p"),
        ("inner",),
    )
    assert root.attributes["kind"] == "kLoop"
    assert root.attributes["control-predecessors"] == "{%p}"
    assert root.op_name == 'jit(f)/a "b", {c}/mul'
    assert root.estimated_cycles == 17169416
    assert root.backend_config["note"].startswith("\nRing{")
    assert [(a.output_index, a.parameter, a.parameter_index) for a in root.aliases] == [
        ((0,), 1, ()), ((1,), 0, (2,)),
    ]  # fmt: skip
    assert [(frame.file, frame.line) for frame in made.frames(root)] == [
        ("/site-packages/jax.py", 9), ("/home/me/model.py", 7),
    ]  # fmt: skip
    assert made.input_output_alias[0].output_index == (0,)
    assert made.name == "jit_f" and made.entry.parameters[0].literal == "0"
    parameter = made.entry.parameters[0]
    assert (parameter.estimated_cycles, parameter.op_name, made.frames(parameter)) == (None, "", ())


def test_notes_of_a_kernel_stand_on_lines_of_their_own():
    notes = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 512}"\n}}'
    made = parse_hlo(
        "HloModule jit_f\n\nENTRY %main (p: f32[1]) -> f32[1] {\n"
        f'  ROOT %k = {ARRAY} custom-call(), {notes}, metadata={{op_name="a/b"}}\n}}\n'
    )
    assert made.entry.root.op_name == "a/b" and "512" in made.entry.root.text


def test_custom_call_target():
    made = module(f'ROOT %b = {ARRAY} custom-call(), custom_call_target="AllocateBuffer"')
    assert made.entry.root.custom_call_target == "AllocateBuffer"


def loop(condition: str, config: str = "", extra: str = ""):
    """A module whose root is a loop with the lines `condition`."""
    condition = computation("cond", f"%p = (s32[]) parameter(0)\n{condition}")
    body = computation("body", "ROOT %q = (s32[]) parameter(0)")
    start = "%i = s32[] constant(0)\n%t = (s32[]) tuple(%i)\n"
    loop = f"ROOT %w = (s32[]) while(%t), condition=%cond, body=%body{config}"
    return module(start + loop, "", extra + condition + body)


INDEX = "%i.1 = s32[] get-tuple-element(%p), index=0\n"


@pytest.mark.parametrize(
    ("comparison", "trips"),
    [
        ("compare(%i.1, %n), direction=LT", 12),
        ("compare(%i.1, %n), direction=LE", 13),
        ("compare(%n, %i.1), direction=GT", 12),
        ("compare(%i.1, %i.1), direction=LT", None),
        ("compare(%i.1, %n), direction=GT", None),
    ],
)
def test_trip_count_of_a_comparison(comparison, trips):
    made = loop(f"{INDEX}%n = s32[] constant(12)\nROOT %c = pred[] {comparison}")
    assert trip_count(made, made.entry.root) == trips


def test_trip_count_through_a_fusion():
    fused = computation(
        "fused",
        """%a = s32[] parameter(1)
           %b = s32[] parameter(0)
           ROOT %c.1 = pred[] compare(%a, %b), direction=LT""",
    )
    lines = "%n = s32[] constant(24)\nROOT %c = pred[] fusion(%n, %i.1), kind=kLoop, calls=%fused"
    made = loop(INDEX + lines, extra=fused)
    assert trip_count(made, made.entry.root) == 24


def test_a_known_trip_count_comes_first():
    made = loop(
        "ROOT %c = pred[] constant(true)", ', backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert trip_count(made, made.entry.root) == 5
    made = loop("ROOT %c = pred[] constant(true)")
    assert trip_count(made, made.entry.root) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "HloModule m\n\nENTRY %e () -> f32[] {\n  %a f32[] nonsense\n}",
            "line 4: not an instruction",
        ),
        ("HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %a = nonsense\n}", "line 4: no shape"),
        (
            "HloModule m\n\nENTRY %e () -> f32[] {\n  %a = f32[] add(%b\n}",
            "line 4: operands without",
        ),
        ("HloModule m\n\nwhat is this\n", "line 3: neither"),
        ("HloModule m\n\nENTRY %e () -> f32[] {\n  %a = f32[] constant(0)", "the text ends"),
        ("", "the text ends"),
    ],
)
def test_an_unreadable_line_is_named(text, problem):
    with pytest.raises(HloSyntaxError, match=problem):
        parse_hlo(text)


def test_time_is_linear_in_the_text():
    payload = '"' + "\\\\x({[" * 200_000 + '"'  # a Pallas kernel's serialized body
    lines = [f"%p = {ARRAY} parameter(0)"]
    lines += [f'%n{i} = {ARRAY} negate(%p), metadata={{op_name="a/b"}}' for i in range(20_000)]
    lines += [f'ROOT %k = {ARRAY} custom-call(%p), backend_config={{"body":{payload}}}']
    start = time.process_time()
    made = module("\n".join(lines))
    assert made.entry.root.backend_config["body"].startswith("\\x({[")
    assert time.process_time() - start < 3  # about 3 MB; a third of a second on one core
