"""What a plan says: the table, the reasons, the line to paste, `plan.json`."""

import collections
import dataclasses
import json
import math
import pathlib

from rich.console import Console
from rich.table import Table

from jaxtpu.plan.candidates import crossing
from jaxtpu.plan.compile_cache import write_whole
from jaxtpu.plan.prices import Price
from jaxtpu.plan.search import Row, SlicePlan

_GIB = 2**30
_SECONDS_A_DAY = 86_400
_WIDEST = 10_000  # of a table, in characters


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be done on a slice.

    Attributes:
      tokens_per_step: of the global batch.
      tokens: to train on in all.
      flops_per_token: without recomputation.
      price: of a chip-hour; None where it is not known.
    """

    tokens_per_step: int
    tokens: float
    flops_per_token: float
    price: Price | None


def figures(plan: SlicePlan, row: Row, work: Workload) -> dict:
    """Everything shown of one candidate, as JSON values.

    `kind` says what the time is: `predicted` from the compiled program, or `estimated` by
    arithmetic. MFU counts 6 FLOPs a weight and 12 L H D T for attention; HFU counts what
    the step computes: recomputation too, but not the blocks of causal attention that a kernel
    skips, so without recomputation it is the lower. Both are of the peak of a device: a core on v2
    and v3.
    """
    slice_ = plan.slice
    peak = slice_.generation.peak_flops_bf16 * slice_.devices
    tokens_per_second = work.tokens_per_step / row.seconds
    chip_hours_per_token = slice_.chips / tokens_per_second / 3600
    compiled = row.result is not None and row.result.fits
    hbm = row.result.hbm_bytes if compiled else row.estimate.hbm_bytes
    return {
        "slice": slice_.name,
        "mesh": row.candidate.sizes,
        "across_slices": list(crossing(row.candidate.mesh, slice_.slices)),
        **dict(row.candidate.knobs),
        "fits": row.fits if row.result else None,
        "hbm_gib": hbm / _GIB,
        "hbm_from": "compiler" if compiled else "estimate",
        "estimated_hbm_gib": row.estimate.hbm_bytes / _GIB,
        "hbm_budget_gib": plan.hbm_gib,
        "reason": why_not(plan, row),
        "kind": "predicted" if row.prediction else "estimated",
        "step_seconds": row.seconds,
        "tokens_per_second": tokens_per_second,
        "mfu": work.flops_per_token * tokens_per_second / peak,
        "hfu": row.estimate.flops * slice_.devices / row.seconds / peak,
        "exposed_communication_seconds": (
            row.prediction.exposed_seconds if row.prediction else None
        ),
        "seconds_by_category": row.prediction.seconds if row.prediction else None,
        "dollars_per_billion_tokens": (
            work.price.usd * chip_hours_per_token * 1e9 if work.price else None
        ),
        "dollars": work.price.usd * chip_hours_per_token * work.tokens if work.price else None,
        "days": work.tokens / tokens_per_second / _SECONDS_A_DAY,
        "flags": row.candidate.flags(),
    }


def why_not(plan: SlicePlan, row: Row) -> str:
    """Why a candidate does not run, in words; empty where it does, or may."""
    budget = f"{plan.hbm_gib:g} GiB a {_device(plan)}"
    if row.unfit:
        return f"has a train step that fits, but {row.unfit}"
    if row.fits:
        return ""
    if row.result is None:
        if plan.likely(row, 1.0):
            return ""
        kind, most = max(row.estimate.bytes_by_kind.items(), key=lambda item: item[1])
        return (
            f"needs about {_gib(row.estimate.hbm_bytes)} of {budget} by arithmetic, "
            f"{_gib(most)} of them {kind}"
        )
    if row.result.error:
        return f"did not compile: {row.result.error}"
    needs = row.result.needed_bytes
    much = f"needs {_gib(needs)}" if needs else "needs more than the"
    return f"{much} of {budget}, says the compiler"


def _device(plan: SlicePlan) -> str:
    return "core" if plan.slice.generation.devices_per_chip > 1 else "chip"


def show(console: Console, plan: SlicePlan, work: Workload) -> None:
    """Prints the table of one slice, the reasons, and the line to paste."""
    console.print(f"\n{summary(plan)}", style="bold", markup=False, soft_wrap=True)
    if not plan.compiled:
        console.print(
            "ESTIMATES ONLY, by arithmetic: the TPU compiler is not installed here. It is the "
            "package libtpu, for Linux on x86-64; with it, memory is the compiler's own figure.",
            markup=False,
            soft_wrap=True,
        )
    _print_rows(console, plan, work)
    for row in plan.rows:
        if reason := why_not(plan, row):
            console.print(f"Not {row.candidate}: it {reason}.", markup=False, soft_wrap=True)
    for line in over_budget(plan):
        console.print(line, markup=False, soft_wrap=True)
    if plan.best:
        console.print(f"Use: {plan.best.candidate.flags()}", markup=False, soft_wrap=True)
    else:
        told = "Nothing could be compiled." if plan.failed else "Nothing fits that was compiled."
        console.print(told, style="bold", markup=False)


def summary(plan: SlicePlan) -> str:
    """The slice, the budget and the candidates, in a line."""
    over = sum(not plan.likely(row, 1.0) for row in plan.considered)
    return (
        f"{plan.slice.name}: {plan.slice.devices} devices, budget {plan.hbm_gib:g} GiB a "
        f"{_device(plan)}; {len(plan.considered)} candidates considered, {over} over the budget by "
        f"arithmetic, {sum(row.result is not None for row in plan.rows)} compiled"
    )


def over_budget(plan: SlicePlan) -> list[str]:
    """A line for each rematerialisation: how many candidates were over, and the nearest of them."""
    groups = collections.defaultdict(list)
    compiled = {row.candidate for row in plan.rows}
    for row in plan.considered:
        if row.candidate not in compiled and not plan.likely(row, 1.0):
            groups[row.candidate["model.remat"]].append(row)
    lines = []
    for remat, rows in groups.items():
        nearest = min(rows, key=lambda row: row.estimate.hbm_bytes)
        lines.append(
            f"Not {len(rows)} more with remat={remat}: the least of them, {nearest.candidate}, "
            f"{why_not(plan, nearest)}."
        )
    return lines


def _print_rows(console: Console, plan: SlicePlan, work: Workload) -> None:
    grid = Table(box=None, pad_edge=False)
    for name in ("mesh", "remat", "attention", "micro", "optimizer", f"GiB/{_device(plan)}", "step s", "MFU",
                 "HFU", "tokens/s", "exposed s", "$/1B tokens", "days"):  # fmt: skip
        grid.add_column(name, no_wrap=True)
    for row in plan.rows:
        grid.add_row(*_cells(figures(plan, row, work), row))
    _print_wide(console, grid)


def _print_wide(console: Console, grid: Table) -> None:
    """All columns, whatever the width of the terminal: it wraps what it must."""
    wide = Console(file=console.file, width=_WIDEST, highlight=False)
    wide.width = max(1, wide.measure(grid).maximum)
    wide.print(grid)


def _cells(values: dict, row: Row) -> list[str]:
    hbm = values["hbm_gib"]
    if row.unfit or (row.result and not row.fits):
        needs = None if row.unfit else row.result.needed_bytes
        hbm = f"{_gib(needs)} !" if needs else "!"
        blank = [""] * 7
    else:
        hbm = _gib(hbm * _GIB) if row.fits else f"~{_gib(hbm * _GIB)}"
        optional = lambda name, form: "-" if values[name] is None else form.format(values[name])  # noqa: E731
        blank = [
            f"{values['step_seconds']:.3f}",
            f"{values['mfu']:.1%}",
            f"{values['hfu']:.1%}",
            f"{values['tokens_per_second']:,.0f}",
            optional("exposed_communication_seconds", "{:.3f}"),
            optional("dollars_per_billion_tokens", "{:,.0f}"),
            f"{values['days']:,.1f}",
        ]
    remat, group = row.candidate["model.remat"], row.candidate["model.remat_group"]
    knobs = [remat if group == 1 else f"{remat}, by {group}", row.candidate["model.attention"]]
    return [
        row.candidate.mesh_words(),
        *knobs,
        str(row.candidate["train.microbatches"]),
        row.candidate["optimizer.placement"],
        hbm,
        *blank,
    ]


def _gib(size: float) -> str:
    """Bytes in GiB, to MiB where there are few."""
    return f"{size / _GIB:.2f}" if size >= _GIB / 10 else f"{size / _GIB:.4f}"


def show_slices(console: Console, plans: list[SlicePlan], works: list[Workload]) -> None:
    """Prints the best of each slice, the cheapest first; those of equal price by time."""
    best = [(p, figures(p, p.best, w)) for p, w in zip(plans, works, strict=True) if p.best]
    unknown = math.inf  # a slice whose price is not known comes last
    cost = lambda values: unknown if values["dollars"] is None else values["dollars"]  # noqa: E731
    best.sort(key=lambda item: (cost(item[1]), item[1]["days"]))
    console.print("\nThe slices, the cheapest first", style="bold")
    grid = Table(box=None, pad_edge=False)
    for name in ("slice", "chips", "MFU", "tokens/s", "days", "dollars", "$/chip-hour", "use"):
        grid.add_column(name, no_wrap=True)
    for plan, values in best:
        work = works[plans.index(plan)]
        grid.add_row(
            plan.slice.name,
            str(plan.slice.chips),
            f"{values['mfu']:.1%}",
            f"{values['tokens_per_second']:,.0f}",
            f"{values['days']:,.1f}",
            "-" if values["dollars"] is None else f"{values['dollars']:,.0f}",
            f"{work.price.usd:g} ({work.price.date})" if work.price else "not known",
            str(plan.best.candidate),
        )
    _print_wide(console, grid)


def write_json(
    path: pathlib.Path, plans: list[SlicePlan], works: list[Workload], extra: dict
) -> None:
    """Every figure of every candidate; times are predictions or estimates, as `kind` says.

    Args:
      extra: more entries of the top level.
    """
    slices = []
    for plan, work in zip(plans, works, strict=True):
        done = {row.candidate for row in plan.rows}
        rest = [row for row in plan.considered if row.candidate not in done]
        slices.append(
            {
                "slice": plan.slice.name,
                "workload": dataclasses.asdict(work),
                "best": figures(plan, plan.best, work) if plan.best else None,
                "rows": [figures(plan, row, work) for row in plan.rows],
                "not_compiled": [figures(plan, row, work) for row in rest],
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps({"slices": slices, **extra}, indent=2) + "\n").encode())
