"""Collectives: the groups of each way to write them, and seconds worked out by hand."""

import numpy as np
import pytest

from jaxtpu.hardware import parse_slice
from jaxtpu.plan.collectives import COLLECTIVE_SECONDS, HOP_SECONDS, LINK_EFFICIENCY, parse_groups
from jaxtpu.plan.timing import TimePrediction, predict_time
from tests.plan.snippets import ARRAY, MIB, module

V3_8 = parse_slice("v3-8")
LINK = 83e9 * LINK_EFFICIENCY
LATENCY = COLLECTIVE_SECONDS + 4 / 2 * HOP_SECONDS  # of a ring of four chips
ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
PARTNERS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add"
ONE_A_CHIP = "replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add"
ALGORITHM = (
    '"collective_algorithm_config":{"emitter":"E","debug":"\\n%s{colors:%d phases:%d cores"}'
)


def predicted(entry: str, slice_=V3_8) -> TimePrediction:
    return predict_time(module(f"%p = {ARRAY} parameter(0)\n{entry}"), slice_)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0,2,1},{3}}", [[0, 2, 1], [3, -1, -1]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['axis_0'=4,'axis_1'=1] {'axis_0'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_groups_of_each_form(text, groups):
    np.testing.assert_array_equal(parse_groups(text, 4), groups)


def test_groups_with_device_ids_are_read_from_an_instruction():
    attributes = "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, to_apply=%add"
    made = predicted(f"ROOT %a = {ARRAY} all-reduce(%p), {attributes}")
    # {0,2,4,6}: as one a chip in the test below.
    assert made.collectives[0][0].group_size == 4
    assert made.exposed["all-reduce"] == pytest.approx(
        LATENCY + 2 * HOP_SECONDS + 2 * 2 * 3 / 4 * MIB / (2 * LINK)
    )


@pytest.mark.parametrize(
    ("opcode", "attributes", "size", "seconds"),
    [
        ("all-gather", ALL, 8 * MIB, LATENCY + 7 * MIB / (2 * LINK)),
        ("reduce-scatter", ALL, MIB, LATENCY + 7 / 8 * MIB / (2 * LINK)),
        ("all-reduce", ALL, MIB, LATENCY + 2 * HOP_SECONDS + 2 * 7 / 8 * MIB / (2 * LINK)),
        # The other cores' group has half of every link.
        ("reduce-scatter", ONE_A_CHIP, MIB, LATENCY + 2 * 3 / 4 * MIB / (2 * LINK)),
        ("all-reduce", PARTNERS, MIB, COLLECTIVE_SECONDS + MIB / 450e9),
        # Two axes of two chips: a hop on average, over two links each.
        ("all-to-all", ALL, MIB, LATENCY + 2 * 7 / 8 * MIB / (4 * LINK)),
    ],
)
def test_seconds_of_a_collective(opcode, attributes, size, seconds):
    made = predicted(f"ROOT %a = {ARRAY} {opcode}(%p), {attributes}")
    assert made.communication == {opcode: (1, size)}
    assert made.exposed == {opcode: pytest.approx(seconds)}
    assert made.step_seconds == pytest.approx(seconds)
    assert made.hidden == {opcode: 0}


@pytest.mark.parametrize(
    ("slice_", "strategy", "links"),
    [
        ("v3-32", ("UniDirection1DRingStrategy", 2, 1), 2),
        ("v3-32", ("UniDirection1DRingStrategy", 1, 1), 1),
        ("v3-32", ("StrategyRing", 1, 1), 2),  # one colour, both ways
        ("v3-32", ("UniDirectionNDRingStrategy", 4, 2), 2),  # no links at the ends of an axis
        ("v3-2048", ("UniDirectionNDRingStrategy", 4, 2), 4),
        ("v5e-256", ("StrategyND", 2, 2), 4),
        ("v4-128", ("UniDirectionNDRingStrategy", 6, 3), 6),
        ("v4-16", ("UniDirectionNDRingStrategy", 6, 3), 3),
    ],
)
def test_links_are_those_of_the_strategy_that_are_there(slice_, strategy, links):
    config = f"backend_config={{{ALGORITHM % strategy}}}"
    entry = f"ROOT %a = {ARRAY} reduce-scatter(%p), replica_groups={{}}, {config}"
    slice_ = parse_slice(slice_)
    made = predicted(entry, slice_=slice_)
    n, axes = slice_.devices, strategy[2]
    latency = COLLECTIVE_SECONDS + HOP_SECONDS * axes * slice_.chips ** (1 / axes) / 2
    rate = slice_.generation.ici_link_bandwidth * LINK_EFFICIENCY * links
    assert made.step_seconds == pytest.approx(latency + (n - 1) / n * MIB / rate)


def test_permutations_share_a_link_only_where_their_pairs_do():
    ring = "source_target_pairs={{0,2},{1,3},{2,4},{3,5},{4,6},{5,7},{6,0},{7,1}}"
    one = COLLECTIVE_SECONDS + HOP_SECONDS + 2 * MIB / LINK  # both cores send to the next chip
    made = predicted(f"ROOT %a = {ARRAY} collective-permute(%p), {ring}")
    assert made.step_seconds == pytest.approx(one)
    start = f"({ARRAY}, {ARRAY}, u32[], u32[]) collective-permute-start(%p)"
    back = "source_target_pairs={{2,0},{3,1},{4,2},{5,3},{6,4},{7,5},{0,6},{1,7}}"
    for second, seconds in ((ring, 2 * one), (back, one)):
        made = predicted(f"""%a = {start}, {ring}
            %b = {start}, {second}
            %c = {ARRAY} collective-permute-done(%a)
            ROOT %d = {ARRAY} collective-permute-done(%b)""")
        assert made.step_seconds == pytest.approx(seconds)
