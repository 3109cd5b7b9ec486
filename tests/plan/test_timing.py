"""Predicted time: each rule on a few lines of HLO with a known answer, and real small programs."""

import json

import numpy as np
import pytest

from jaxtpu.hardware import parse_slice
from jaxtpu.plan.collectives import (
    COLLECTIVE_SECONDS,
    DCN_BYTES_PER_SECOND,
    HOP_SECONDS,
    LINK_EFFICIENCY,
)
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.playback import HOST_BYTES_PER_SECOND, clock
from jaxtpu.plan.timing import TimePrediction, mfu, predict_time
from tests.plan.snippets import ARRAY, MIB, TWO, computation, module

V3_8 = parse_slice("v3-8")
START = f"%p = {ARRAY} parameter(0)\n"
ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
RING = '"collective_algorithm_config":{"debug":"StrategyRing{colors:1 phases:1 cores:{8}}"}'
LINKS = 2 * 83e9 * LINK_EFFICIENCY  # both ways of the ring of a v3-8's four chips
LATENCY = COLLECTIVE_SECONDS + 4 / 2 * HOP_SECONDS
GATHERED = LATENCY + 7 * MIB / LINKS  # one MiB from each of eight cores


def cycles(count: int, op_name: str = "") -> str:
    """Attributes of an operation of `count` cycles."""
    note = f'{{"window_config":{{"estimated_cycles":"{count}"}}}}'
    return f'metadata={{op_name="{op_name}"}}, backend_config={note}'


def predicted(entry: str, computations: str = "", slice_=V3_8) -> TimePrediction:
    return predict_time(module(START + entry, "", computations), slice_)


FUSED = computation(
    "fused", f"{START}%d = {ARRAY} convolution(%p), {cycles(999)}\nROOT %e = {ARRAY} add(%d)"
)


def until(name: str, runs: str) -> str:
    """The condition `until_NAME` of a loop, with its limit `runs`."""
    condition = f"""%i = s32[] parameter(0)
        %n = s32[] {runs}
        ROOT %c = pred[] compare(%i, %n), direction=LT"""
    return computation(f"until_{name}", condition)


def test_cycles_inside_fusions_are_not_counted_again_and_loops_multiply():
    inner = computation(
        "inner", f"{START}ROOT %f = {ARRAY} fusion(%p), calls=%fused, {cycles(100)}"
    )
    outer = computation(
        "outer",
        f"""{START}%a = {ARRAY} add(%p), {cycles(7)}
        ROOT %w = {ARRAY} while(%a), condition=%until_i, body=%inner""",
    )
    conditions = until("i", "constant(3)") + until("o", "constant(5)")
    made = predicted(
        f"ROOT %w = {ARRAY} while(%p), condition=%until_o, body=%outer",
        FUSED + inner + outer + conditions,
    )
    assert made.cycles == 5 * (7 + 3 * 100)
    assert made.seconds["matrix products"] == pytest.approx(1500 / 940e6)
    assert made.seconds["elementwise"] == pytest.approx(35 / 940e6)
    assert made.step_seconds == pytest.approx(made.cycles / 940e6)


def test_a_loop_of_unknown_length_is_counted_once_and_told():
    body = computation("body", f"{START}ROOT %a = {ARRAY} add(%p), {cycles(9)}")
    entry = f"ROOT %w = {ARRAY} while(%p), condition=%until_x, body=%body"
    made = predicted(entry, body + until("x", "parameter(1)"))
    assert (made.cycles, made.unknown_loops) == (9, ("w",))
    none = predicted(entry, body + until("x", "constant(0)"))
    assert (none.cycles, none.unknown_loops) == (0, ())


def test_the_longest_branch_and_calls():
    parts = [
        computation(name, f"{START}ROOT %a = {ARRAY} add(%p), {cycles(n)}")
        for name, n in (("short", 10), ("long", 30))
    ]
    made = predicted(
        f"""%i = s32[] constant(0)
        %b = {ARRAY} conditional(%i, %p, %p), branch_computations={{%short, %long}}
        ROOT %c = {ARRAY} call(%b), to_apply=%short""",
        "".join(parts),
    )
    assert made.cycles == 30 + 10


def gather_around(work: int) -> str:
    """An asynchronous all-gather with `work` cycles between its ends."""
    return f"""%s = ({ARRAY}, f32[2048,1024]) all-gather-start(%p), {ALL}
        %a = {ARRAY} add(%p), {cycles(work)}
        ROOT %d = f32[2048,1024] all-gather-done(%s)"""


@pytest.mark.parametrize("share", [0, 0.25, 1, 3])
def test_an_asynchronous_collective_hides_behind_what_runs_meanwhile(share):
    work = round(share * GATHERED * 940e6)
    made = predicted(gather_around(work))
    exposed = max(0, GATHERED - work / 940e6)
    assert made.exposed["all-gather"] == pytest.approx(exposed)
    assert made.hidden["all-gather"] == pytest.approx(GATHERED - exposed)
    assert made.step_seconds == pytest.approx(max(GATHERED, work / 940e6))


def test_an_asynchronous_collective_in_a_loop():
    body = computation("body", START + gather_around(1000))
    entry = f"ROOT %w = {ARRAY} while(%p), condition=%until_x, body=%body"
    made = predicted(entry, body + until("x", "constant(6)"))
    assert made.communication == {"all-gather": (6, 6 * 8 * MIB)}
    assert made.exposed["all-gather"] == pytest.approx(6 * (GATHERED - 1000 / 940e6))
    assert made.hidden["all-gather"] == pytest.approx(6000 / 940e6)


def test_a_collective_around_a_loop_hides_behind_all_of_its_runs():
    body = computation("body", f"{START}ROOT %a = {ARRAY} add(%p), {cycles(1000)}")
    made = predicted(
        f"""%s = ({ARRAY}, f32[2048,1024]) all-gather-start(%p), {ALL}
        %w = {ARRAY} while(%p), condition=%until_x, body=%body
        ROOT %d = f32[2048,1024] all-gather-done(%s)""",
        body + until("x", "constant(6)"),
    )
    assert made.exposed["all-gather"] == pytest.approx(GATHERED - 6000 / 940e6)


def test_two_collectives_at_a_time_share_the_links():
    made = predicted(f"""%s = ({ARRAY}, f32[2048,1024]) all-gather-start(%p), {ALL}
        %t = ({ARRAY}, f32[2048,1024]) all-gather-start(%p), {ALL}
        %d = f32[2048,1024] all-gather-done(%s)
        ROOT %e = f32[2048,1024] all-gather-done(%t)""")
    assert made.step_seconds == pytest.approx(2 * GATHERED)


def test_a_wrapped_collective():
    wrapped = computation("wrapped", f"{START}ROOT %g = f32[2048,1024] all-gather(%p), {ALL}")
    made = predicted(
        f"""%s = (({ARRAY}), f32[2048,1024], u32[]) async-start(%p), calls=%wrapped
        %u = (({ARRAY}), f32[2048,1024], u32[]) async-update(%s)
        %a = {ARRAY} add(%p), {cycles(10000)}
        ROOT %d = f32[2048,1024] async-done(%u)""",
        wrapped,
    )
    assert made.exposed["all-gather"] == pytest.approx(GATHERED - 10000 / 940e6)


def test_a_collective_fused_with_compute():
    def part(name: str, target: str) -> str:
        call = f'ROOT %c = {ARRAY} custom-call(%g), custom_call_target="{target}"'
        call = call if target else f"ROOT %c = {ARRAY} convolution(%p, %p)"
        gather = f"%g = f32[2048,1024] all-gather(%p), channel_id=7, {ALL}"
        return computation(name, f"{START}{gather}\n{call}")

    made = predicted(
        f"""%s = {ARRAY} fusion(%p), calls=%begin
        %f = {ARRAY} fusion(%s), calls=%meanwhile, {cycles(20000)}
        ROOT %d = {ARRAY} fusion(%f), calls=%end""",
        part("begin", "AsyncCollectiveStart")
        + part("meanwhile", "")
        + part("end", "AsyncCollectiveDone"),
    )
    assert made.communication == {"all-gather": (1, 8 * MIB)}
    assert made.seconds["matrix products"] == pytest.approx(20000 / 940e6)
    assert made.exposed["all-gather"] == pytest.approx(GATHERED - 20000 / 940e6)


def test_an_all_reduce_fused_with_a_slice_is_a_reduce_scatter():
    inside = f"""{START}%r = {ARRAY} all-reduce(%p), {ALL}
        ROOT %s = f32[32,1024] dynamic-slice(%r)"""
    config = f"backend_config={{{RING}}}"
    made = predicted(
        f"ROOT %f = f32[32,1024] fusion(%p), kind=kCustom, calls=%fused_scatter, {config}",
        computation("fused_scatter", inside),
    )
    assert made.communication == {"reduce-scatter": (1, MIB)}
    assert made.step_seconds == pytest.approx(LATENCY + 7 / 8 * MIB / LINKS)


def test_what_is_written_into_an_array_on_the_host_is_what_moves():
    there = "f32[64,512,512]{2,1,0:T(8,128)S(5)}"
    made = predicted(f"""%h = {there} parameter(1)
        %s = (({there}, {ARRAY}, s32[]), {there}, u32[]) dynamic-update-slice-start(%h, %p)
        ROOT %d = {there} dynamic-update-slice-done(%s)""")
    assert made.step_seconds == pytest.approx(MIB / (HOST_BYTES_PER_SECOND / 2))


def test_copies_between_memories_run_beside_compute():
    work = 1000 / 940e6
    for space, rate in ((1, 450e9), (5, HOST_BYTES_PER_SECOND / 2)):
        there = ARRAY.replace(")}", f")S({space})}}")
        made = predicted(f"""%s = ({there}, {ARRAY}, u32[]) copy-start(%p)
            %a = {ARRAY} add(%p), {cycles(1000)}
            ROOT %d = {there} copy-done(%s)""")
        assert made.seconds["copies"] == pytest.approx(MIB / rate - work)
        assert not made.exposed


def test_what_has_no_cycles_moves_its_bytes_or_nothing():
    made = predicted(f"""%i = s32[] constant(0)
        %b = {ARRAY} bitcast(%p)
        %t = {TWO} tuple(%b, %p)
        ROOT %s = {ARRAY} sort(%p), dimensions={{0}}""")
    assert made.cycles == 0
    assert made.seconds["elementwise"] == made.step_seconds == pytest.approx(2 * MIB / 450e9)


def kernel(op_name: str, estimate: str) -> dict[str, float]:
    """Seconds of a Pallas kernel by category."""
    config = f'{{"custom_call_config":{{"body":"TUzv","cost_estimate":{estimate}}}}}'
    made = predicted(
        f"""ROOT %k = {ARRAY} custom-call(%p), custom_call_target="tpu_custom_call",
        metadata={{op_name="{op_name}"}}, backend_config={config}""".replace("\n", " ")
    )
    return {name: seconds for name, seconds in made.seconds.items() if seconds}


def test_kernels_take_their_own_estimate():
    flops = '{"flops":6150000000,"transcendentals":0,"bytes_accessed":1000}'
    assert kernel("jit(f)/loss/pallas_call", flops) == {"kernels": pytest.approx(1e-4)}
    moved = '{"flops":1,"transcendentals":0,"bytes_accessed":45000000}'
    assert kernel("jit(f)/layers/attention/pallas_call", moved) == {
        "attention": pytest.approx(1e-4)
    }
    assert kernel("", "{}") == {"kernels": pytest.approx(2 * MIB / 450e9)}


def test_splash_attention_is_counted_from_its_shapes():
    """4 heads, 2048 positions in blocks of 512: 10 of 16 blocks, 64 % of v5e's peak forward."""
    queries = "bf16[4,2048,128]{2,1,0:T(8,128)(2,1)}"
    name = "a/attention/splash_mha_fwd_segmented_residuals/pallas_call"
    notes = 'kernel_metadata={"xprof_metadata":"{\\"block_q\\": 512}"}'
    made = predicted(
        f"""%q = {queries} parameter(1)
        ROOT %k = {queries} custom-call(%p, %q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={{{notes}}}, metadata={{op_name="{name}"}}""",
        slice_=parse_slice("v5e-8"),
    )
    # The first operand of three dimensions is the queries.
    flops = 2 * 2 * 4 * 2048 * 2048 * 128 * 10 / 16
    assert made.seconds["attention"] == pytest.approx(flops / (0.64 * 197e12))


@pytest.mark.parametrize(
    ("op_name", "category"),
    [
        ("jit(f)/layers/attention/BTKGD,BSKD->BKGTS/dot_general", "attention"),
        ("jit(f)/checkpoint/layers/attention/reduce_max", "attention"),
        ("jit(f)/layers/attention/query/dot_general", "matrix products"),
        ("jit(f)/layers/attention_norm/mul", "matrix products"),
        ("", "matrix products"),
    ],
)
def test_attention_is_told_by_its_path(op_name, category):
    entry = f"ROOT %f = {ARRAY} fusion(%p), calls=%fused, {cycles(94, op_name)}"
    made = predicted(entry, FUSED)
    assert made.seconds[category] == pytest.approx(1e-7)


def test_a_fusion_without_a_path_takes_one_from_inside():
    path = "jit(f)/layers/attention/exp"
    inside = computation(
        "inside", f'{START}ROOT %e = {ARRAY} add(%p), metadata={{op_name="{path}"}}'
    )
    entry = f"ROOT %f = {ARRAY} fusion(%p), calls=%inside, {cycles(94, 'reshape.1')}"
    assert predicted(entry, inside).seconds["attention"] == pytest.approx(1e-7)


def test_fusions_that_only_move_are_copies():
    inside = computation(
        "inside", f"{START}%t = {ARRAY} transpose(%p)\nROOT %b = {ARRAY} bitcast(%t)"
    )
    made = predicted(f"ROOT %f = {ARRAY} fusion(%p), calls=%inside, {cycles(94)}", inside)
    assert made.seconds["copies"] == pytest.approx(1e-7)


def test_other_slices_are_reached_over_the_data_centre_network():
    name = 'frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.1_0"}'
    made = predicted(
        f"""%t = token[] after-all()
        %r = ({ARRAY}, u32[], token[]) recv(%t), {name}
        %s = ({ARRAY}, u32[], token[]) send(%p, %t), {name}
        %e = token[] send-done(%s)
        %a = {ARRAY} add(%p), {cycles(1000)}
        ROOT %d = ({ARRAY}, token[]) recv-done(%r)""",
        slice_=parse_slice("2xv3-8"),
    )
    seconds = COLLECTIVE_SECONDS + MIB / (DCN_BYTES_PER_SECOND / 8)
    assert made.exposed["dcn"] == pytest.approx(seconds - 1000 / 940e6)
    across = "replica_groups={{0,8}}, to_apply=%add"
    made = predicted(f"ROOT %a = {ARRAY} all-reduce(%p), {across}", slice_=parse_slice("2xv3-8"))
    assert made.exposed["all-reduce"] == pytest.approx(seconds)


def test_mfu_and_json():
    made = predicted(f"ROOT %a = {ARRAY} all-reduce(%p), {ALL}")
    assert json.loads(json.dumps(made.to_json())) == made.to_json()
    assert made.to_json()["collectives"][0]["count"] == 1
    tokens = 1000
    needed = 61.5e12 * 8 * made.step_seconds / tokens
    assert mfu(made, needed / 2, tokens, V3_8) == pytest.approx(0.5)


def test_every_generation_has_a_clock():
    assert clock(V3_8.generation) == 940e6
    assert clock(parse_slice("v7x-8").generation) == pytest.approx(2.2e9, rel=0.01)
    assert clock(parse_slice("v6e-8").generation) == 1750e6


@pytest.fixture(scope="module", params=["v3-8", "v5e-16"])
def real(request):
    """(program, slice) of six layers whose weights are gathered, as compiled for a slice."""
    pytest.importorskip("libtpu")
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxtpu.plan.compiler import slice_devices
    from tests.plan.test_liveness import quiet

    slice_ = parse_slice(request.param)

    def loss(weights, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    with quiet():
        mesh = Mesh(np.array(slice_devices(slice_)), "d")
        shaped = lambda shape, *spec: jax.ShapeDtypeStruct(  # noqa: E731
            shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec))
        )
        weights, x = shaped((6, 512, 512), None, "d"), shaped((1024, 512), "d")
        sharded = jax.jit(jax.grad(loss), out_shardings=weights.sharding)
        return parse_hlo(sharded.lower(weights, x).compile().as_text()), slice_


@pytest.mark.tpu_compile
def test_a_real_program(real):
    program, slice_ = real
    made = predict_time(program, slice_)
    assert not made.unknown_loops
    parts = [*made.seconds.values(), *made.exposed.values(), *made.hidden.values()]
    assert all(seconds >= 0 for seconds in parts)
    assert sum(made.communication[kind][1] for kind in made.communication) > 6 * 512 * 512 * 2
    # Each layer's product forward, and two of them backward, at the peak.
    flops = 3 * 2 * 6 * 1024 / slice_.devices * 512 * 512
    assert made.step_seconds > flops / slice_.generation.peak_flops_bf16
    assert made.cycles / clock(slice_.generation) <= made.compute_seconds * (1 + 1e-9)
    assert made.seconds["matrix products"] > 0
    assert {c.group_size for c, _ in made.collectives} <= {2, slice_.devices}
