"""Pictures: summits of memory, and labels that lie inside the picture and on no other label."""

import io
import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from jaxtpu.plan.breakdown import MemoryReport, breakdown, largest, moment, padded
from jaxtpu.plan.liveness import Event, Loop, Timeline
from jaxtpu.plan.pictures import TimeBar, time_figure, time_png, timeline_figure, timeline_png
from jaxtpu.plan.summits import rise_words, rises, spans
from tests.plan.snippets import MIB
from tests.plan.test_breakdown import step

SECONDS = {"matrix products": 2.0, "attention": 1.0, "copies": 0.01, "exposed communication": 0.5}


def event(number: int, level: int, phase: str, *loops: str) -> Event:
    return Event(f"fusion.{number}", "fusion", f"layers/part{number % 3}", phase, loops, level, 0)


def events(levels: str, phases: str) -> list[Event]:
    """Events with the digits of `levels` as bytes, and phases by their first letters."""
    names = {"f": "forward", "b": "backward", "o": "other"}
    return [event(i, int(x), names[y]) for i, (x, y) in enumerate(zip(levels, phases, strict=True))]


def report(made: Timeline) -> MemoryReport:
    total = made.peak_bytes + MIB
    peak = moment(made, made.events[made.peak_index])
    parts = breakdown(made, total, total)
    tensors = largest(made, 15)
    return MemoryReport(total, parts, 0, 0, made.peak_bytes, peak, tensors, padded(made), {}, made)


def crowded() -> Timeline:
    """Forty summits of much the same height side by side, in loops as narrow as they get."""
    made = step()
    levels = [(6 + 4 * (i % 2) + (i % 7 == 0)) * MIB for i in range(80)]
    inside = ("while.0", "while.1")
    found = [
        event(i, x, "forward" if i < 40 else "backward", *inside) for i, x in enumerate(levels)
    ]
    loops = (
        Loop("while.0", "", "other", 0, 79, 4),
        Loop("while.1", "decoder", "forward", 1, 3, 24),
        Loop("while.1", "decoder", "backward", 41, 79, 24),
    )
    peak = max(range(80), key=levels.__getitem__)
    return Timeline(tuple(found), loops, 0, levels[peak], peak, made.peak_buffers, 0)


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie on each other, and those that leave the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    for axes in figure.axes:  # labels of ticks that are out of view are not drawn
        lowest, highest = sorted(axes.get_ylim())
        hidden = [t for t in axes.get_yticklabels() if not lowest <= t.get_position()[1] <= highest]
        lowest, highest = axes.get_xlim()
        hidden += [
            t for t in axes.get_xticklabels() if not lowest <= t.get_position()[0] <= highest
        ]
        texts = [text for text in texts if text not in hidden]
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in texts]
    whole = figure.bbox
    found = [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]
    out = [t for t, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > whole.x1 or b.y1 > whole.y1]
    return found + [(text, "the edge") for text in out]


def test_rises_go_from_a_valley_to_a_summit():
    found = rises(events("1123239115591", "f" * 13))
    assert [(r.valley, r.summit, r.bytes) for r in found] == [(0, 3, 2), (4, 6, 7), (7, 11, 8)]
    assert rises(events("55555", "fffff")) == []
    assert [(r.valley, r.summit) for r in rises(events("0129", "ffff"))] == [(0, 3)]


def test_a_rise_in_words():
    (rise,) = rises(events("0269", "oobb"))
    assert rise_words(events("0269", "oobb"), rise) == (
        "9 B more, to 9 B, backward: layers/part2 4 B, layers/part0 3 B, layers/part1 2 B"
    )


def test_passes_are_joined_where_they_are_too_short_to_see():
    phases = "b" * 4 + "f" * 40 + "b" + "f" * 5 + "b" * 40 + "o" * 10
    assert spans(events("1" * 100, phases)) == [
        ("other", 0, 3),  # nothing is backward before there was a forward pass
        ("forward", 4, 49),
        ("backward", 50, 89),
        ("other", 90, 99),
    ]
    assert spans(events("11", "oo")) == [("other", 0, 1)]


@pytest.mark.parametrize("budget", [0.9, 1.0, 1.02, 1.5])
@pytest.mark.parametrize("made", [step(), crowded()], ids=["step", "crowded"])
def test_labels_of_the_timeline_lie_apart(made, budget):
    told = report(made)
    assert overlapping(timeline_figure(told, budget * told.hbm_bytes, "A step")) == []


def test_labels_of_the_bars_lie_apart():
    bars = [
        TimeBar(f"fsdp {i} x tensor 4, full, {i} microbatches, splash", SECONDS) for i in (1, 2, 16)
    ]
    figure = time_figure([*bars, TimeBar("data 8", {"kernels": 1e-4})], "Time")
    assert overlapping(figure) == []


def test_pictures_are_png_files():
    told = report(step())
    for data in (
        timeline_png(told, 2**30, "A step"),
        time_png([TimeBar("fsdp 8", SECONDS)], "Time"),
    ):
        height, width, _ = imread(io.BytesIO(data)).shape
        assert 150 < height < 1200 and 900 < width < 1700
