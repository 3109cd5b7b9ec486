"""`run.py plan --validate`: our predicted speeds beside those that others measured and published.

Each setting of `published.py` is compiled for its slice, as a plan would, and played through. The
constants of the time model are fitted again to what comes out: the fit that stands in the code is
the one that this printed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxtpu.config import Config, finalize
from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.errors import EXIT_CRASH, EXIT_OK
from jaxtpu.hardware import parse_slice
from jaxtpu.plan.calibrate import Error, Fit, fit, median_absolute, rank_correlation
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, read_hlo
from jaxtpu.plan.hlo import Module, parse_hlo
from jaxtpu.plan.playback import CONSTANTS, Constants
from jaxtpu.plan.published import ROWS, Published
from jaxtpu.plan.timing import predict_time

_GIB = 2**30
_LEAST_FOR_FIT = 5  # rows, for two constants


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A published figure and ours.

    Attributes:
      row: what was published.
      published: its MFU.
      predicted: ours; None where the setting did not compile.
      step_seconds: predicted.
      exposed: the part of a step that waits for communication.
      hbm_gib: of a device, by the compiler.
      reason: why there is no prediction.
    """

    row: Published
    published: float
    predicted: float | None = None
    step_seconds: float | None = None
    exposed: float | None = None
    hbm_gib: float | None = None
    reason: str = ""

    @property
    def error(self) -> float:
        """Of our MFU, relative to the published one: +0.1 where we promise a tenth too much."""
        return self.predicted / self.published - 1


def validate(out: Console) -> int:
    """Prints the table, its summary and the fit.

    Returns:
      Exit code: 0, or 1 where nothing compiled.

    Raises:
      CompilerMissingError: libtpu is not installed.
    """
    configs = [finalized(row) for row in ROWS]
    results = _compile(out, ROWS, configs)
    programs = [parse_hlo(read_hlo(result)) if result.fits else None for result in results]
    comparisons = [compare(*parts) for parts in zip(ROWS, configs, results, programs, strict=True)]
    show(out, comparisons)
    known = [place for place, made in enumerate(comparisons) if made.predicted is not None]
    if len(known) < _LEAST_FOR_FIT:
        return EXIT_OK if known else EXIT_CRASH
    fitted = fit([_error(ROWS[place], configs[place], programs[place]) for place in known])
    show_fit(out, fitted)
    return EXIT_OK


def finalized(row: Published) -> Config:
    """The configuration of a row, as it is for its slice."""
    config = row.config()
    vocab_size = make_tokenizer(config.data.tokenizer, config.data.separator).vocab_size
    finalize(config, parse_slice(row.slice).devices, vocab_size)
    return config


def _compile(
    out: Console, rows: Sequence[Published], configs: Sequence[Config]
) -> list[CompileResult]:
    """One at a time, in the memory that the chips have: a sharing budget is ours, not theirs."""
    requests = [
        CompileRequest(
            config.to_dict(),
            row.slice,
            parse_slice(row.slice).generation.hbm_gib,
            make_tokenizer(config.data.tokenizer, config.data.separator).vocab_size,
            compiler_options=_as_its_source(row),
        )
        for row, config in zip(rows, configs, strict=True)
    ]
    with _progress(out, len(requests)) as advance:
        return compile_all(requests, workers=1, on_done=lambda *_: advance())


def _as_its_source(row: Published) -> dict[str, str]:
    """The compiler's own defaults, but for what the source sets."""
    ours = parse_slice(row.slice).generation.compiler_options
    return {name: "" for name, _ in ours} | dict(row.options)


@contextlib.contextmanager
def _progress(out: Console, total: int) -> Iterator:
    """A bar on a terminal; a line elsewhere."""
    what = "compiling the published settings"
    if not out.is_terminal:
        out.print(f"{what}: {total}, up to three minutes each the first time", markup=False)
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def compare(
    row: Published,
    config: Config,
    result: CompileResult,
    program: Module | None,
    constants: Constants = CONSTANTS,
) -> Comparison:
    """A row's figure and ours.

    Args:
      config: of the row, finalized.
      program: as compiled; None where it was not.
    """
    published = row.published_mfu(config)
    if program is None:
        needs = f"needs {(result.needed_bytes or 0) / _GIB:.1f} GiB a device"
        return Comparison(row, published, reason=result.error or needs)
    made = predict_time(program, parse_slice(row.slice), constants)
    return Comparison(
        row,
        published,
        predicted=row.mfu_at(made.step_seconds, config),
        step_seconds=made.step_seconds,
        exposed=made.exposed_seconds / made.step_seconds,
        hbm_gib=result.hbm_bytes / _GIB,
    )


def _error(row: Published, config: Config, program: Module) -> Error:
    published, slice_ = row.published_mfu(config), parse_slice(row.slice)

    def error(constants: Constants) -> float:
        seconds = predict_time(program, slice_, constants).step_seconds
        return row.mfu_at(seconds, config) / published - 1

    return error


def show(out: Console, comparisons: Sequence[Comparison]) -> None:
    """The table, what was assumed, and the summary."""
    grid = Table(box=None, pad_edge=False)
    for name in ("", "model", "slice", "remat", "attention", "GiB", "step s", "exposed",
                 "MFU published", "predicted", "error"):  # fmt: skip
        grid.add_column(name, no_wrap=True)
    for number, made in enumerate(comparisons, 1):
        grid.add_row(str(number), *_cells(made))
    out.print("\nModel FLOPs utilisation: measured by others, and predicted here", style="bold")
    out.print(grid)
    for told, numbers in _notes(comparisons).items():
        out.print(f"{', '.join(numbers)}: {told}", markup=False, soft_wrap=True)
    known = [made for made in comparisons if made.predicted is not None]
    if len(known) > 1:
        ranks = rank_correlation([m.published for m in known], [m.predicted for m in known])
        out.print(
            f"\n{len(known)} of {len(comparisons)} settings predicted: median absolute error "
            f"{median_absolute([m.error for m in known]):.1%}, rank correlation {ranks:.2f}",
            style="bold",
            markup=False,
        )


def _notes(comparisons: Sequence[Comparison]) -> dict[str, list[str]]:
    """What was assumed, and where the figure stands, with the numbers of the rows it is true of."""
    notes: dict[str, list[str]] = {}
    for number, made in enumerate(comparisons, 1):
        parts = [made.reason and f"no prediction: {made.reason}", made.row.assumed]
        told = "; ".join(filter(None, parts)) or "as published"
        notes.setdefault(f"{told} <{made.row.source}>", []).append(str(number))
    return notes


def _cells(made: Comparison) -> list[str]:
    row = made.row
    cells = [row.name, row.slice, row.remat, row.attention]
    if made.predicted is None:
        return [*cells, "-", "-", "-", f"{made.published:.1%}", "-", "-"]
    return [
        *cells,
        f"{made.hbm_gib:.1f}",
        f"{made.step_seconds:.3f}",
        f"{made.exposed:.0%}",
        f"{made.published:.1%}",
        f"{made.predicted:.1%}",
        f"{made.error:+.0%}",
    ]


def show_fit(out: Console, fitted: Fit) -> None:
    """The constants in use, those that fit best, and how these do on rows that they never saw."""
    now, best = CONSTANTS, fitted.constants
    out.print("\nConstants of the time model: in use, and best on these rows", style="bold")
    for name, used, new in (
        ("PRODUCT_EFFICIENCY", now.product_efficiency, best.product_efficiency),
        ("LINK_EFFICIENCY", now.network.link_efficiency, best.network.link_efficiency),
    ):
        out.print(f"{name:<20}{used:g}  {new:g}", markup=False)
    out.print(
        f"Median absolute error with the best: {median_absolute(fitted.errors):.1%}; of each row "
        f"with the best of all others: {median_absolute(fitted.left_out):.1%} "
        f"(largest {max(map(abs, fitted.left_out)):.0%})",
        markup=False,
        soft_wrap=True,
    )
