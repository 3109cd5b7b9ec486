"""`report.html`: a plan as one file that needs nothing else, neither network nor scripts.

It is made from plain data: the dicts of `report.figures`, reports of memory and pictures. Whoever
calls `write_page` decides what goes in; what is missing is left out.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtpu.plan.breakdown import UNEXPLAINED, MemoryReport, amount
from jaxtpu.plan.compile_cache import write_whole
from jaxtpu.plan.host import DeviceMemory, HostMemory
from jaxtpu.plan.markup import bullets, document, escaped, label, picture, table

_LABELS = {
    "compiled": "by the TPU compiler, for the slice, with no TPU",
    "predicted": "from the compiled program's schedule and a model of what it does not tell",
    "estimated": "by arithmetic: nothing was compiled for it",
}


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """What something holds at its peak.

    Attributes:
      what: `train`, `restore`, `host RAM of a process`.
      bytes: that it needs.
      available: bytes that there are; None where that is not known.
      label: `compiled`, `predicted` or `estimated`.
      note: what the bytes are, in words.
    """

    what: str
    bytes: int
    available: int | None
    label: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class SliceSection:
    """What the page tells of one slice. Empty and None: left out.

    Attributes:
      name: `v3-8`.
      summary: a line under the heading: devices, budget, how many candidates.
      rows: `report.figures` of each candidate, the best first.
      reasons: why others do not fit, a sentence each, beside the `reason` of the rows.
      command: the line to paste.
      memory: what each program holds, and the host; see `memory_rows`.
      report: of the best candidate's train program.
      timeline_png: `pictures.timeline_png` of it.
      time_png: `pictures.time_png` of the candidates.
    """

    name: str
    summary: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    reasons: Sequence[str] = ()
    command: str = ""
    memory: Sequence[MemoryRow] = ()
    report: MemoryReport | None = None
    timeline_png: bytes = b""
    time_png: bytes = b""


def memory_rows(
    reports: Mapping[str, MemoryReport],
    budget_bytes: int,
    device: DeviceMemory | None = None,
    host: HostMemory | None = None,
) -> list[MemoryRow]:
    """The rows of a candidate.

    Args:
      reports: by program: init, train, evaluate.
      budget_bytes: HBM of a device.
      device: HBM of checkpoints and ready batches.
      host: RAM of a process.
    """
    rows = []
    for name, report in reports.items():
        note = f"peak {report.peak_at}; and {amount(report.code_bytes)} of code beside it"
        rows.append(MemoryRow(name, report.hbm_bytes, budget_bytes, "compiled", note))
    if device:
        notes = {
            "restore": "the state; each shard goes to its device once",
            "save": "the state, ready batches, and slices of what several devices hold",
            "ready batches": "on the device, beside the train program",
        }
        sizes = (device.restore, device.save, device.ready_batches)
        for (name, note), size in zip(notes.items(), sizes, strict=True):
            rows.append(MemoryRow(name, size, budget_bytes, "estimated", note))
    if host:
        held = ("process", "compiler", "offloaded", "checkpoint", "loader", "restore")
        sizes = [f"{name} {amount(getattr(host, name))}" for name in held if getattr(host, name)]
        note = f"{', '.join(sizes)}; a restore and a save do not meet"
        what = "host RAM of a process"
        rows.append(MemoryRow(what, host.total, host.available, "estimated", note))
    return rows


def write_page(
    path: pathlib.Path,
    sections: Sequence[SliceSection],
    *,
    title: str,
    versions: Mapping[str, str],
    notes: Sequence[str] = (),
) -> None:
    """Writes the page, and the folder that it is in.

    Args:
      path: of `report.html`.
      sections: of each slice, in order.
      title: of the page: `llama2_7b`.
      versions: of jax, jaxlib and libtpu; empty where nothing was compiled.
      notes: sentences under the title: tokens to train on, prices and their dates.

    Raises:
      OSError: it cannot be written.
    """
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    body = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="pale">{escaped(f"Compiled with {used}." if used else "Nothing was compiled.")}</p>',
        *(f"<p>{escaped(note)}</p>" for note in notes),
        "<p>" + " ".join(f"{label(k)} {escaped(v)}.<br>" for k, v in _LABELS.items()) + "</p>",
        *(_section(section) for section in sections),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, document(title, body).encode())


def _section(section: SliceSection) -> str:
    """One slice, from the heading to the last list."""
    reasons = [f"Not {_name(row)}: it {row['reason']}." for row in section.rows if row["reason"]]
    reasons += section.reasons
    parts = [f"<h2>{escaped(section.name)}</h2>"]
    if section.summary:
        parts.append(f'<p class="pale">{escaped(section.summary)}</p>')
    if section.command:
        parts.append(f"<h3>Use</h3><pre>{escaped(section.command)}</pre>")
    if section.rows:
        parts += ["<h3>Candidates</h3>", _candidates(section.rows)]
    if section.time_png:
        parts.append(picture(section.time_png, "Seconds of a step by category"))
    if reasons:
        parts += ["<h3>What does not fit, and why</h3>", bullets(reasons)]
    if section.memory:
        parts += ["<h3>Memory of each program</h3>", _memory(section.memory)]
    if section.report:
        parts += _explained(section.report)
    if section.timeline_png:
        parts += [
            "<h3>Memory over a train step</h3>",
            picture(section.timeline_png, "Live memory over the schedule of the train step"),
        ]
    return "\n".join(parts)


def _explained(report: MemoryReport) -> list[str]:
    """What the memory of the train program is for, the largest tensors, and padding."""
    share = lambda size: size / report.hbm_bytes if report.hbm_bytes else 0.0  # noqa: E731
    rows = [
        (
            escaped(name),
            amount(size),
            f"{share(size):.1%}",
            f'<span class="bar" style="width:{max(0, round(280 * share(size)))}px"></span>',
        )
        for name, size in report.parts.items()
        if size or name == UNEXPLAINED
    ]
    total = "the compiler's total"
    rows.append((total, amount(report.hbm_bytes), "100.0%", ""))
    rows.append(("code, beside it", amount(report.code_bytes), "", ""))
    heads = ("part", "bytes", "of the total", "")
    classes = ["total" if row[0] == total else "" for row in rows]
    parts = [
        "<h3>What the memory of the train step is for</h3>",
        f"<p>At the peak: {escaped(report.peak_at)}. The last part is what the compiler has beyond "
        "the buffers that are live then: gaps between them, for it packs no tighter than it "
        "must.</p>",
        table(heads, rows, numbers={1, 2}, classes=classes),
        "<h3>Largest tensors at the peak</h3>",
        bullets(tensor.words for tensor in report.largest),
    ]
    if report.padded:
        lost = sum(tensor.lost_bytes for tensor in report.padded)
        parts += [
            "<h3>Lost to tiles</h3>",
            "<p>The two minor dimensions of an array are padded to whole tiles (8 x 128 of 32 "
            f"bits). These lose more than a tenth of their memory, {amount(lost)} in all.</p>",
            bullets(f"{amount(tensor.lost_bytes)} of {tensor.words}" for tensor in report.padded),
        ]
    return parts


def _candidates(rows: Sequence[Mapping[str, Any]]) -> str:
    """The ranked table; the first that fits is marked."""
    best = next((row for row in rows if row["fits"]), None)
    heads = ("candidate", "GiB", "", "step", "", "MFU", "HFU", "tokens/s", "waits for communication",
             "$ a billion tokens", "days")  # fmt: skip
    cells = []
    for row in rows:
        over = row["fits"] is False
        memory = "over" if over else f"{row['hbm_gib']:.2f}"
        told = "compiled" if row["fits"] or over else "estimated"
        forms = {
            "mfu": "{:.1%}", "hfu": "{:.1%}", "tokens_per_second": "{:,.0f}",
            "exposed_communication_seconds": "{:.3f} s", "dollars_per_billion_tokens": "{:,.0f}",
            "days": "{:,.1f}",
        }  # fmt: skip
        numbers = ["" if over else _number(row[key], form) for key, form in forms.items()]
        step = ["", ""] if over else [f"{row['step_seconds']:.3f} s", label(row["kind"])]
        cells.append((escaped(_name(row)), memory, label(told), *step, *numbers))
    classes = ["best" if row is best else "over" if row["fits"] is False else "" for row in rows]
    return table(heads, cells, numbers={1, 3, 5, 6, 7, 8, 9, 10}, words={0}, classes=classes)


def _memory(rows: Sequence[MemoryRow]) -> str:
    cells = []
    for row in rows:
        known = row.available is not None
        share = f"{row.bytes / row.available:.0%} of {amount(row.available)}" if known else "?"
        cells.append(
            (escaped(row.what), amount(row.bytes), share, label(row.label), escaped(row.note))
        )
    heads = ("what", "bytes", "of what there is", "", "")
    return table(heads, cells, numbers={1, 2}, words={4})


def _name(row: Mapping[str, Any]) -> str:
    """`fsdp 8, dots, auto, 4 microbatches`: the mesh, then every other knob (`model.remat`)."""
    axes = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
    knobs = {name: value for name, value in row.items() if "." in name}
    micro = knobs.pop("train.microbatches", 1)
    words = [f"{name.rpartition('.')[2]} {v}" if isinstance(v, bool | int | float) else str(v)
             for name, v in knobs.items()]  # fmt: skip
    return ", ".join([axes or "one device", *words, f"{micro} microbatch{'es' * (micro != 1)}"])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
