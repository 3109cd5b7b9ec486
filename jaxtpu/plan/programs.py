"""Every program of a candidate, not the train step alone: what a run needs from start to end."""

import dataclasses
from collections import Counter

from rich.console import Console

from jaxtpu.config import Config, RunUnits
from jaxtpu.hardware import Slice
from jaxtpu.plan.breakdown import UNEXPLAINED, MemoryReport, amount, explain_memory
from jaxtpu.plan.candidates import Candidate
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all
from jaxtpu.plan.host import abstract_arguments, device_memory, host_memory
from jaxtpu.plan.page import MemoryRow, memory_rows
from jaxtpu.plan.progress import OnProgress
from jaxtpu.plan.search import Row, SlicePlan

_GIB = 2**30
_OTHERS = ("init", "evaluate")


@dataclasses.dataclass(frozen=True)
class Programs:
    """The memory of a run.

    Attributes:
      train: the train step, explained; None without the compiler.
      rows: each program, checkpoints, the host.
      failures: in words, for each program that does not fit.
    """

    train: MemoryReport | None
    rows: list[MemoryRow]
    failures: list[str]


def whole_runs(
    plan: SlicePlan,
    config: Config,
    units: RunUnits,
    *,
    hbm_gib: float,
    vocab_size: int,
    on_progress: OnProgress,
) -> tuple[SlicePlan, Programs | None]:
    """`plan` with a best row that runs from start to end, and that row's programs.

    A row whose train step fits and something else does not is no longer one that fits.

    Args:
      config: without a mesh, as `plan_slice` takes it.
    """
    while row := plan.best:
        programs = all_programs(
            config, row, plan.slice, units,
            hbm_gib=hbm_gib, vocab_size=vocab_size, on_progress=on_progress,
        )  # fmt: skip
        if not programs.failures:
            return plan, programs
        unfit = dataclasses.replace(row, unfit="; ".join(programs.failures))
        plan = dataclasses.replace(plan, rows=[unfit if r is row else r for r in plan.rows])
    return plan, None


def all_programs(
    config: Config,
    row: Row,
    slice_: Slice,
    units: RunUnits,
    *,
    hbm_gib: float,
    vocab_size: int,
    on_progress: OnProgress,
) -> Programs:
    """Compiles what else the run of a candidate has, and adds up what no program counts.

    Args:
      config: without a mesh, as `plan_slice` takes it.
      row: of the candidate, with the compiler's answer where there is a compiler.
    """
    chosen = row.candidate.apply(config)
    state, batch = abstract_arguments(chosen, row.candidate.sizes, units)
    reports, failures, offloaded = {}, [], None
    if row.result:
        reports["train"], offloaded = explain_memory(row.result), row.result.host_bytes
        on_progress("compiling init and evaluate", 0, 2)
        for name, result in zip(
            _OTHERS, _compile(chosen, slice_, hbm_gib, vocab_size), strict=True
        ):
            if result.fits:
                reports[name] = explain_memory(result)
            else:
                failures.append(_failure(name, result, hbm_gib))
        order = ("init", "train", "evaluate")
        reports = {name: reports[name] for name in order if name in reports}
    device = device_memory(state, batch, chosen.data.prefetch)
    host = host_memory(
        state,
        batch,
        slice_,
        offloaded_bytes=offloaded,
        mapped_bytes=round(config.data.cache_gib * 2**30),
        host_memory_gib=_host_gib(slice_),
    )
    rows = memory_rows(reports, round(hbm_gib * _GIB), device, host)
    for found in rows:
        if found.available is not None and found.bytes > found.available:
            failures.append(
                f"{found.what} needs {amount(found.bytes)} of {amount(found.available)}"
            )
    return Programs(reports.get("train"), rows, failures)


def _host_gib(slice_: Slice) -> float | None:
    """RAM of a host of the slice; machines of more or fewer chips have it in proportion."""
    generation = slice_.generation
    if generation.host_memory_gib is None:
        return None
    chips = slice_.chips // slice_.hosts
    return generation.host_memory_gib * chips / generation.chips_per_host


def _compile(config: Config, slice_: Slice, hbm_gib: float, vocab_size: int) -> list[CompileResult]:
    requests = [
        CompileRequest(config.to_dict(), slice_.name, hbm_gib, vocab_size, program)
        for program in _OTHERS
    ]
    return compile_all(requests)


def _failure(name: str, result: CompileResult, hbm_gib: float) -> str:
    if result.error:
        return f"{name} did not compile: {result.error}"
    needs = amount(result.needed_bytes) if result.needed_bytes else "more"
    return f"{name} needs {needs} of {hbm_gib:g} GiB a device"


def show_programs(console: Console, candidate: Candidate, programs: Programs) -> None:
    """Prints the memory of each program, and what that of the train step is for."""
    say = lambda text: console.print(text, markup=False, soft_wrap=True)  # noqa: E731
    console.print(f"\nMemory of {candidate}", style="bold", markup=False, soft_wrap=True)
    for row in programs.rows:
        of = f" of {amount(row.available)}" if row.available is not None else ""
        say(f"{row.what:<22}{amount(row.bytes):>9}{of}, {row.label}: {row.note}")
    if programs.train:
        parts = programs.train.parts.items()
        told = [f"{name} {amount(size)}" for name, size in parts if size and name != UNEXPLAINED]
        share = programs.train.unexplained_fraction
        say(f"train is {', '.join(told)}; {UNEXPLAINED} {share:+.1%}")
        if programs.train.padded:
            say("more than a tenth lost to tiles:")
            lost = Counter(f"{amount(t.lost_bytes)} of {t.words}" for t in programs.train.padded)
            for words, count in lost.items():
                say(f"  {words}" if count == 1 else f"  {count} times {words}")
