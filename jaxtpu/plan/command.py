"""`run.py plan`: for each slice, what fits, how fast it is and what it costs."""

import copy
import math
import pathlib

from rich.console import Console

from jaxtpu.config import Config, RunUnits, finalize, run_units
from jaxtpu.config.validate import check_axes
from jaxtpu.config.vision import VISION_MODELS
from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.errors import EXIT_CRASH, EXIT_OK, ConfigError
from jaxtpu.hardware import Slice, parse_slice
from jaxtpu.models import make_model
from jaxtpu.observe.console import make_console
from jaxtpu.plan import folder
from jaxtpu.plan.candidates import candidates, fixed_fields, no_candidate
from jaxtpu.plan.explain import explain, show_explanation
from jaxtpu.plan.prices import Price, price_per_chip_hour
from jaxtpu.plan.programs import show_programs, whole_runs
from jaxtpu.plan.progress import progress
from jaxtpu.plan.report import Workload, show, show_slices
from jaxtpu.plan.search import Row, SlicePlan, plan_slice
from jaxtpu.precision import make_precision

EXIT_NOTHING_FITS = 3


def plan(
    config: Config,
    slices: str,
    *,
    given: set[str],
    opened: set[str] = frozenset(),
    hbm_gib: float | None = None,
    tokens: float | None = None,
    compiles: int = 4,
) -> int:
    """Prints a table for each slice and writes `plans/<name>/`.

    Args:
      config: as loaded.
      slices: names joined by commas: `v3-8,v3-32`.
      given: dotted names that the command line sets.
      opened: dotted names of fields to try although the config sets them.
      hbm_gib: budget of a device; None takes the slice's default (8 GiB on v3).
      tokens: to train on in all; None takes the config's length.
      compiles: candidates to compile for each slice.

    Returns:
      Exit code: 0, 3 where nothing fits on any slice, or 1 where nothing could be compiled.
    """
    if config.model.name in VISION_MODELS:
        raise ConfigError(
            "model.name", config.model.name, "reads images; plans are made for models of text.",
            "For example: --config=configs/lm_1b.py",
        )  # fmt: skip
    out = make_console()
    fixed = fixed_fields(config, given, opened)
    vocab_size = make_tokenizer(config.data.tokenizer, config.data.separator).vocab_size
    check_axes(config.mesh)
    names = dict.fromkeys(name.strip().lower() for name in slices.split(","))
    asked = [parse_slice(name) for name in names]
    budgets = [budget(slice_, hbm_gib) for slice_ in asked]
    for slice_ in asked:  # before anything takes long
        ready, _ = without_mesh(config, slice_, vocab_size, tokens)
        if not any(True for _ in candidates(ready, slice_, fixed)):
            raise no_candidate(ready, slice_, fixed)
    findings = [
        _plan_one(out, config, slice_, gib, fixed, vocab_size, tokens, compiles)
        for slice_, gib in zip(asked, budgets, strict=True)
    ]
    if len(findings) > 1:
        show_slices(out, [f.plan for f in findings], [f.work for f in findings])
    out.print()
    for path in folder.write(pathlib.Path("plans") / config.name, config.name, findings):
        out.print(f"Written: {path}", markup=False, soft_wrap=True)
    if any(found.plan.best for found in findings):
        return EXIT_OK
    return EXIT_CRASH if all(found.plan.failed for found in findings) else EXIT_NOTHING_FITS


def _plan_one(
    out: Console,
    config: Config,
    slice_: Slice,
    hbm_gib: float,
    fixed: set[str],
    vocab_size: int,
    tokens: float | None,
    compiles: int,
) -> folder.Finding:
    """Plans one slice and prints what was found."""
    ready, units = without_mesh(config, slice_, vocab_size, tokens)
    work = workload(ready, units, slice_, tokens)
    known = {"hbm_gib": hbm_gib, "vocab_size": vocab_size}
    programs = explanation = None
    with progress(out, slice_.name) as on_progress:
        known["on_progress"] = on_progress
        found = plan_slice(ready, slice_, units, fixed=fixed, compiles=compiles, **known)
        found, programs = whole_runs(found, ready, units, **known)
        if nearest := None if found.best else _nearest(found):
            explanation = explain(ready, nearest.candidate, slice_, units, **known)
    show(out, found, work)
    if programs:
        show_programs(out, found.best.candidate, programs)
    if explanation:
        show_explanation(out, explanation, hbm_gib)
    return folder.Finding(found, work, programs, explanation)


def _nearest(found: SlicePlan) -> Row | None:
    """Of the candidates that are too large, that which lacks least; None if there is none."""
    large = [r for r in found.rows if r.result and not r.result.fits and not r.result.error]
    return min(large, key=lambda row: row.result.needed_bytes or math.inf, default=None)


def budget(slice_: Slice, hbm_gib: float | None = None) -> float:
    """GiB of a device: what is asked for, or the generation's default.

    The compiler keeps some of the physical memory to itself, and can only lower its limit.

    Raises:
      ConfigError: more than there is, or next to nothing.
    """
    generation = slice_.generation
    if hbm_gib is None:
        return generation.default_budget_gib
    if not 1 / 1024 <= hbm_gib <= generation.hbm_gib:
        raise ConfigError(
            "--hbm_gib", hbm_gib, f"a device of {slice_.name} has {generation.hbm_gib:g} GiB.",
            f"Use at most {generation.hbm_gib:g}, and 1 MiB at least.",
        )  # fmt: skip
    return min(hbm_gib, generation.hbm_limit_gib or hbm_gib)


def without_mesh(
    config: Config, slice_: Slice, vocab_size: int, tokens: float | None = None
) -> tuple[Config, RunUnits]:
    """`config` with the fields derived that no mesh decides, and what a step amounts to.

    Args:
      tokens: of the run, in place of a length in epochs: no data are read here.
    """
    ready = copy.deepcopy(config)
    ready.mesh.update({"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": slice_.devices})
    ready.train.microbatches = 1
    if tokens is not None and ready.train.epochs is not None:
        steps = tokens / (ready.data.batch_size * ready.data.sequence_length)
        ready.train.update({"epochs": None, "steps": max(1, round(steps))})
    finalize(ready, slice_.devices, vocab_size)
    ready.mesh, ready.train.microbatches = copy.deepcopy(config.mesh), config.train.microbatches
    return ready, run_units(ready, examples=None)


def workload(config: Config, units: RunUnits, slice_: Slice, tokens: float | None) -> Workload:
    """What is to be done on a slice, and the price of its chips."""
    precision = make_precision(config.precision)
    model = make_model(config.model, precision, config.data.sequence_length)
    total = units.steps * units.tokens_per_step if tokens is None else tokens
    price = price_per_chip_hour(slice_.generation.name, config.plan.price_kind)
    if config.plan.price is not None:
        price = Price(config.plan.price, date="yours", source="config.plan.price")
    return Workload(units.tokens_per_step, total, model.flops_per_token, price)
