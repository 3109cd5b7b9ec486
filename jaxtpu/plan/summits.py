"""The shape of live memory over a schedule: its summits, what makes them, and its passes."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from jaxtpu.plan.breakdown import amount
from jaxtpu.plan.liveness import Event

_NARROW = 0.04  # of all events: a pass that has less is part of its neighbour
_RISES, _LEAST_RISE, _MAKERS = 6, 0.04, 4  # the second is of the peak


@dataclasses.dataclass(frozen=True)
class Rise:
    """From a valley of live memory to the next summit: indices of events."""

    valley: int
    summit: int
    bytes: int


def rises(events: Sequence[Event]) -> list[Rise]:
    """The largest rises from a valley to a summit, in order; smaller ones between are passed."""
    levels = [event.bytes for event in events]
    least = _LEAST_RISE * max(levels)
    found, valley, summit = [], 0, 0
    for i, level in enumerate([*levels, float("-inf")]):  # the end is a fall from the last summit
        if levels[summit] - level > least:
            if levels[summit] - levels[valley] > least:
                found.append(Rise(valley, summit, levels[summit] - levels[valley]))
            valley = summit = i
        elif level > levels[summit]:
            summit = i
        if i < len(levels) and level < levels[valley] and levels[summit] - levels[valley] <= least:
            valley = summit = i
    largest = sorted(found, key=lambda rise: -rise.bytes)[:_RISES]
    return sorted(largest, key=lambda rise: rise.summit)


def spans(events: Sequence[Event]) -> list[tuple[str, int, int]]:
    """(phase, first, last) of each pass; what is too short goes to its neighbour."""
    phases = [event.phase for event in events]
    if "forward" in phases:  # what the backward pass starts from may be made long before it
        start = phases.index("forward")
        phases[:start] = ["other"] * start
    runs = [[name, len(list(run))] for name, run in itertools.groupby(phases)]
    while len(runs) > 1 and min(length for _, length in runs) < _NARROW * len(events):
        at = min(range(len(runs)), key=lambda i: runs[i][1])
        neighbours = [i for i in (at - 1, at + 1) if 0 <= i < len(runs)]
        runs[max(neighbours, key=lambda i: runs[i][1])][1] += runs[at][1]
        del runs[at]
        joined = itertools.groupby(runs, key=lambda run: run[0])
        runs = [[name, sum(length for _, length in group)] for name, group in joined]
    ends = list(itertools.accumulate(length for _, length in runs))
    return [(name, end - length, end - 1) for (name, length), end in zip(runs, ends, strict=True)]


def rise_words(events: Sequence[Event], rise: Rise) -> str:
    """`2.4 GiB more, to 4.3 GiB, forward: decoder/layers/attention 1.5 GiB, ...`: who adds most."""
    added: collections.Counter[str] = collections.Counter()
    for before, event in itertools.pairwise(events[rise.valley : rise.summit + 1]):
        added[event.path or event.instruction] += event.bytes - before.bytes
    summit = events[rise.summit]
    phase = f", {summit.phase}" if summit.phase != "other" else ""
    most = [(name, size) for name, size in added.most_common(_MAKERS) if 10 * size > rise.bytes]
    names = ", ".join(f"{name} {amount(size)}" for name, size in most or added.most_common(1))
    return f"{amount(rise.bytes)} more, to {amount(summit.bytes)}{phase}: {names}"
