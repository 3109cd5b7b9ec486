"""Pictures of a plan, as PNG: live memory over the schedule, and where the time of a step goes.

Figures are made without pyplot, which would keep every one of them. What needs many words stands
beside the axes, under numbers that stand in them: no two labels overlap, whatever the program.
"""

import dataclasses
import io
import itertools
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxtpu.plan.breakdown import MemoryReport, Tensor, amount, largest, loop_words
from jaxtpu.plan.liveness import Event
from jaxtpu.plan.summits import Rise, rise_words
from jaxtpu.plan.summits import rises as find_rises
from jaxtpu.plan.summits import spans as find_spans

_MIB, _GIB = 2**20, 2**30
_DPI = 110
_WIDTH, _LEFT, _PLOT, _WORDS = 13.5, 0.05, 0.575, 0.645  # inches; of the width
_CHARACTER = 0.0079  # of the plot's width, at 8 points
_BLUE, _RED, _INK, _PALE = "#2f6db3", "#b8322a", "#22262b", "#8a8f98"
_SHADES = {"forward": "#e6f0fa", "backward": "#fdeedd", "other": "#f3f3f1"}
_LOOPS = {"forward": "#a9cbea", "backward": "#f3c796", "other": "#d3d6d8"}
_COLOURS = {
    "matrix products": "#2f6db3", "attention": "#7db3e3", "kernels": "#4aa3a2",
    "elementwise": "#93b96b", "copies": "#c3c7cc", "exposed communication": "#d98b3a",
}  # fmt: skip
_DARK = {"matrix products", "kernels"}
_MORE_COLOURS = ("#8e6bb0", "#b06b8e", "#6b7fb0", "#b0a36b")
# They take neither memory nor time; drawn, they would be most of the width.
_NOTHING = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple", "add-dependency"}
_TENSORS, _LINE, _LINES = 9, 66, 34


@dataclasses.dataclass(frozen=True)
class TimeBar:
    """A candidate's step, for `time_png`.

    Attributes:
      label: `fsdp 8, dots, 4 microbatches`.
      seconds: by category; `exposed communication` is one, and they add up to the step.
    """

    label: str
    seconds: Mapping[str, float]


def timeline_png(report: MemoryReport, budget_bytes: float, title: str) -> bytes:
    """Live memory over the schedule of a program, each loop's body once.

    Args:
      report: of the program.
      budget_bytes: of the device, drawn as a line.
      title: of the picture.
    """
    return _png(timeline_figure(report, budget_bytes, title))


def timeline_figure(report: MemoryReport, budget_bytes: float, title: str) -> Figure:
    """The picture of `timeline_png`, not drawn yet."""
    made = report.timeline
    drawn = [i for i, e in enumerate(made.events) if e.opcode not in _NOTHING]
    drawn = sorted({*drawn, made.peak_index})
    events = [made.events[i] for i in drawn]
    rises = find_rises(events)
    depth = max(len(event.loops) for event in events)
    height, strip, foot = 6.0 + 0.25 * depth, 0.25 * depth, 0.35  # inches
    figure = Figure((_WIDTH, height), _DPI, facecolor="white")
    bottom = (foot + strip + 0.05) / height
    plot = figure.add_axes((_LEFT, bottom, _PLOT, 1 - 0.62 / height - bottom))
    _shade(plot, events)
    unit, name = (_GIB, "GiB") if report.hbm_bytes >= _GIB else (_MIB, "MiB")
    levels = [event.bytes / unit for event in events]
    _curve(plot, levels, name)
    _levels(plot, report.hbm_bytes / unit, budget_bytes / unit, name)
    _numbers(plot, levels, rises, drawn.index(made.peak_index))
    figure.text(0.01, 1 - 0.27 / height, title, fontsize=12, fontweight="bold", color=_INK)
    loops = figure.add_axes((_LEFT, foot / height, _PLOT, max(strip, 0.02) / height))
    _loops(loops, report, drawn, depth)
    _words(figure, height, report, events, rises)
    return figure


def time_png(bars: Sequence[TimeBar], title: str) -> bytes:
    """The predicted seconds of a step by category, a bar for each candidate, the first on top."""
    return _png(time_figure(bars, title))


def time_figure(bars: Sequence[TimeBar], title: str) -> Figure:
    """The picture of `time_png`, not drawn yet."""
    categories = list(dict.fromkeys([*_COLOURS, *(name for bar in bars for name in bar.seconds)]))
    categories = [c for c in categories if any(bar.seconds.get(c) for bar in bars)]
    more = itertools.cycle(_MORE_COLOURS)
    colours = {name: _COLOURS.get(name) or next(more) for name in categories}
    height = 1.25 + 0.42 * len(bars)
    figure = Figure((11, height), _DPI, facecolor="white")
    labels = ["\n".join(textwrap.wrap(bar.label, 40)) for bar in bars]
    plot = figure.add_axes((0.27, 0.72 / height, 0.66, 1 - 1.12 / height))
    longest = max((sum(bar.seconds.values()) for bar in bars), default=0) or 1.0
    for row, bar in enumerate(bars):
        start = 0.0
        for name in categories:
            seconds = bar.seconds.get(name, 0.0)
            plot.barh(row, seconds, 0.68, start, color=colours[name], edgecolor="white")
            share = seconds / (sum(bar.seconds.values()) or 1.0)
            if seconds > 0.06 * longest:
                plot.text(start + seconds / 2, row, f"{share:.0%}", ha="center", va="center",
                          fontsize=8, color="white" if name in _DARK else _INK)  # fmt: skip
            start += seconds
        plot.text(start + 0.008 * longest, row, f"{start:.3g} s", va="center", fontsize=9,
                  color=_INK)  # fmt: skip
    plot.set_yticks(range(len(bars)), labels, fontsize=9)
    plot.set_ylim(len(bars) - 0.5, -0.5)
    plot.set_xlim(0, 1.1 * longest)
    plot.set_xlabel("seconds a step, predicted", fontsize=9, color=_INK)
    _bare(plot)
    plot.tick_params(left=False)
    handles = [plot.barh(0, 0, color=colours[name], label=name) for name in categories]
    figure.legend(handles=handles, loc="lower center", ncols=max(1, len(handles)), frameon=False,
                  fontsize=9, handlelength=1.0, columnspacing=1.2)  # fmt: skip
    figure.text(0.01, 1 - 0.27 / height, title, fontsize=12, fontweight="bold", color=_INK)
    return figure


def _shade(plot: Axes, events: Sequence[Event]) -> None:
    """Forward, backward and the rest as bands, with their names on top."""
    spans = find_spans(events)
    trains = any(name == "backward" for name, _, _ in spans)
    for number, (name, first, last) in enumerate(spans):
        plot.axvspan(first, last + 1, color=_SHADES[name], linewidth=0, zorder=0)
        if name == "other":
            name = ("optimizer" if number == len(spans) - 1 else "") if trains else ""
        if 1.1 * len(name) * _CHARACTER < (last + 1 - first) / len(events):
            plot.text((first + last + 1) / 2, 0.985, name, fontsize=9, ha="center", va="top",
                      transform=plot.get_xaxis_transform(), color=_PALE)  # fmt: skip


def _curve(plot: Axes, levels: Sequence[float], unit: str) -> None:
    """Live memory: level while an operation runs."""
    edges = range(len(levels) + 1)
    plot.fill_between(
        edges, [*levels, levels[-1]], step="post", color=_BLUE, alpha=0.22, linewidth=0
    )
    plot.step(edges, [*levels, levels[-1]], where="post", color=_BLUE, linewidth=1.3)
    plot.set_xlim(0, len(levels))
    plot.set_xticks([])
    plot.set_ylabel(f"{unit} live on one device", fontsize=9, color=_INK)
    _bare(plot)


def _levels(plot: Axes, total: float, budget: float, unit: str) -> None:
    """The budget and the compiler's total, named above the plot."""
    plot.set_ylim(0, 1.17 * max(total, budget))
    for level, name, colour, style in (
        (budget, "budget", _RED, "--"),
        (total, "the compiler's total", _INK, ":"),
    ):
        plot.axhline(level, color=colour, linestyle=style, linewidth=1.2,
                     label=f"{name}, {level:.3g} {unit}")  # fmt: skip
    plot.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8.5,
                borderaxespad=0.1)  # fmt: skip


def _numbers(plot: Axes, levels: Sequence[float], rises: Sequence[Rise], peak: int) -> None:
    """A number over each summit, beside the one before where summits are close; the peak is red."""
    apart, up = 0.03 * len(levels), 0.03 * plot.get_ylim()[1]
    places = [rise.summit + 0.5 for rise in rises]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + apart)
    for back, i in enumerate(reversed(range(len(places)))):
        places[i] = min(places[i], len(levels) - (back + 0.5) * apart)
    for number, (rise, x) in enumerate(zip(rises, places, strict=True), 1):
        under = levels[max(0, int(x - apart / 2)) : int(x + apart / 2) + 1]
        level = max(*under, levels[rise.summit])
        plot.text(x, level + up, str(number), fontsize=8, color="white", ha="center",
                  va="center", zorder=5, fontweight="bold",
                  bbox={"boxstyle": "circle,pad=0.22", "ec": "white",
                        "fc": _RED if rise.summit == peak else _BLUE})  # fmt: skip
    if peak not in {rise.summit for rise in rises}:
        plot.plot(peak + 0.5, levels[peak], "o", color=_RED, markersize=6, zorder=5)


def _loops(strip: Axes, report: MemoryReport, drawn: Sequence[int], depth: int) -> None:
    """Bars under the plot for what runs more than once, inner loops below outer ones."""
    made = report.timeline
    strip.set_xlim(0, len(drawn))
    strip.set_ylim(max(depth, 1), 0)
    strip.axis("off")
    strip.text(0.5, -0.06 if depth else 0.0, "operations in the order in which they run, a loop's body once",
               transform=strip.transAxes, ha="center", va="top", fontsize=8.5, color=_PALE)  # fmt: skip
    for loop in made.loops:
        inside = [at for at, i in enumerate(drawn) if loop.first <= i <= loop.last]
        if not inside:
            continue
        row = len(made.events[loop.last].loops) - 1
        width = len(inside)
        strip.barh(row + 0.5, width, 0.84, inside[0], color=_LOOPS[loop.phase])
        words = loop_words(made, loop)
        phase = f" {loop.phase}" if loop.phase != "other" else ""
        texts = (words + phase, words, words.rpartition("/")[2], f"x {loop.trips or '?'}")
        room = width / len(drawn) / _CHARACTER
        text = next((text for text in texts if len(text) < room), "")
        strip.text(inside[0] + width / 2, row + 0.5, text, ha="center", va="center", fontsize=8,
                   color=_INK)  # fmt: skip


def _words(
    figure: Figure,
    height: float,
    report: MemoryReport,
    events: Sequence[Event],
    rises: Sequence[Rise],
) -> None:
    """What the numbers stand for, and what is live at the peak, beside the plot."""
    lines = [(f"At the peak (red), {amount(report.peak_bytes)}", True)]
    lines += [(line, False) for line in _wrapped(report.peak_at)] + [("", False)]
    held = _grouped(largest(report.timeline, len(report.timeline.peak_buffers)))
    for text in itertools.islice(held, _TENSORS):
        lines += [(line, False) for line in _wrapped(text)]
    lines += [("", False), ("Largest rises", True)] if rises else []
    for number, rise in enumerate(rises, 1):
        lines += [(line, False) for line in _wrapped(f"{number}  {rise_words(events, rise)}")]
    for row, (text, bold) in enumerate(lines[:_LINES]):
        figure.text(_WORDS, 1 - (0.66 + 0.165 * row) / height, text, fontsize=8.3, color=_INK,
                    fontweight="bold" if bold else "normal")  # fmt: skip


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE, subsequent_indent="     ", break_on_hyphens=False)


def _grouped(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Tensors in words, those of one shape and use together, the largest sums first."""
    groups: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.array, tensor.part), []).append(tensor)
    for group in sorted(groups.values(), key=lambda group: -sum(t.bytes for t in group)):
        if len(group) == 1:
            yield group[0].words
            continue
        shared = os.path.commonprefix([tensor.path.split("/") for tensor in group])
        where = f", {'/'.join(shared)}" if shared else ""
        yield f"{len(group)} x {group[0].words.partition(', ')[0]}{where}"


def _bare(plot: Axes) -> None:
    """No frame where it says nothing."""
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(_PALE)
    plot.tick_params(labelsize=8.5, colors=_INK, color=_PALE)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
