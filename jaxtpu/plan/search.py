"""The search: enumerate, estimate, compile the best, rank by predicted time."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxtpu.config import Config, RunUnits
from jaxtpu.errors import ConfigError
from jaxtpu.hardware import Slice
from jaxtpu.plan.candidates import Candidate, candidates, no_candidate
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, has_compiler, read_hlo
from jaxtpu.plan.estimate import Estimate, check_mesh, estimates
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.progress import OnProgress
from jaxtpu.plan.timing import TimePrediction, predict_time

_GIB = 2**30
# An estimate is at most a tenth below the compiler and rarely as far above, so a candidate beyond
# this much of the budget would be a wasted compile.
_SURE_NOT_TO_FIT = 1.2
_ROUNDS = 3  # of compiles, each of the next best candidates, until one fits
_OF_A_MESH = 2  # candidates of one mesh in a round: neighbours tell little of each other


@dataclasses.dataclass(frozen=True)
class Row:
    """A candidate with what is known of it.

    Attributes:
      candidate: mesh and knobs.
      estimate: by arithmetic.
      result: of the train step, by the TPU compiler; None where it was not compiled.
      prediction: time of a step from the compiled program; None where it does not fit.
      unfit: why its run would fail although its train step fits: what else does not.
    """

    candidate: Candidate
    estimate: Estimate
    result: CompileResult | None = None
    prediction: TimePrediction | None = None
    unfit: str = ""

    @property
    def fits(self) -> bool:
        """Whether the compiler said so."""
        return self.result is not None and self.result.fits and not self.unfit

    @property
    def seconds(self) -> float:
        """Seconds a step: predicted from the compiled program, or estimated."""
        return self.prediction.step_seconds if self.prediction else self.estimate.seconds


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """What was found for one slice.

    Attributes:
      slice: devices.
      hbm_gib: budget of a device.
      considered: every candidate that fits together by arithmetic, best estimate first.
      rows: the candidates that were compiled (or, without the compiler, the best estimates), the
        fastest that fits first.
    """

    slice: Slice
    hbm_gib: float
    considered: list[Row]
    rows: list[Row]

    @property
    def best(self) -> Row | None:
        """The fastest candidate that fits; without the compiler, that is estimated to."""
        if self.compiled:
            return next((row for row in self.rows if row.fits), None)
        return next((r for r in self.rows if self.likely(r, 1.0) and not r.unfit), None)

    @property
    def compiled(self) -> bool:
        """Whether the compiler was asked."""
        return any(row.result for row in self.rows)

    @property
    def failed(self) -> bool:
        """Whether the compiler has gone wrong with every candidate, so that nothing is known."""
        return self.compiled and all(row.result and row.result.error for row in self.rows)

    def likely(self, row: Row, share: float = _SURE_NOT_TO_FIT) -> bool:
        """Whether a candidate's estimate is within a share of the budget."""
        return row.estimate.hbm_bytes <= share * self.hbm_gib * _GIB


def plan_slice(
    config: Config,
    slice_: Slice,
    units: RunUnits,
    *,
    fixed: set[str],
    hbm_gib: float,
    vocab_size: int,
    compiles: int = 4,
    on_progress: OnProgress = lambda what, done, total: None,
) -> SlicePlan:
    """The best ways to run `config` on a slice.

    Args:
      config: as loaded; each candidate is finalized for the slice.
      units: of the run.
      fixed: dotted names of fields that keep their value.
      hbm_gib: budget of a device, which the compiler enforces.
      vocab_size: of the tokenizer.
      compiles: candidates to compile; more, in rounds, while none fits.
      on_progress: told of (what, number done, number in all).

    Raises:
      ConfigError: nothing fits together, or no mesh divides the parameters; the field to change is
        named.
    """
    found = list(candidates(config, slice_, fixed))
    if not found:
        raise no_candidate(config, slice_, fixed)
    found = _divided(config, found, units)
    guesses = estimates(config, found, slice_, units, on_progress)
    rows = [Row(*pair) for pair in zip(found, guesses, strict=True)]
    over = lambda row: row.estimate.hbm_bytes > hbm_gib * _GIB  # noqa: E731
    plan = SlicePlan(slice_, hbm_gib, sorted(rows, key=lambda r: (over(r), r.seconds)), [])
    ranked = [row for row in plan.considered if plan.likely(row)]
    if not ranked:  # nothing is likely to fit: the compiler shall say by how much
        ranked = sorted(rows, key=lambda row: row.estimate.hbm_bytes)
    if not has_compiler():
        return dataclasses.replace(plan, rows=ranked[:compiles])

    compiled: list[Row] = []
    for _ in range(_ROUNDS):
        batch = varied(ranked, compiles)
        ranked = [row for row in ranked if row not in batch]
        compiled += compile_rows(
            [config] * len(batch), slice_, batch, hbm_gib, vocab_size, on_progress
        )
        if any(row.fits for row in compiled) or not ranked:
            break
        ranked.sort(key=lambda row: row.estimate.hbm_bytes)  # memory is what is short
    return dataclasses.replace(
        plan, rows=sorted(compiled, key=lambda row: (not row.fits, row.seconds))
    )


def _divided(config: Config, found: Sequence[Candidate], units: RunUnits) -> list[Candidate]:
    """The candidates whose mesh a run accepts.

    Raises:
      ConfigError: there is none; of the first.
    """
    refused: dict[tuple[int, ...], ConfigError] = {}
    for candidate in {candidate.mesh: candidate for candidate in found}.values():
        try:
            check_mesh(config, candidate, units)
        except ConfigError as error:
            refused[candidate.mesh] = error
    kept = [candidate for candidate in found if candidate.mesh not in refused]
    if not kept:
        raise next(iter(refused.values()))
    return kept


def varied(rows: Sequence[Row], number: int) -> list[Row]:
    """The first rows, but one of a mesh and rematerialisation as long as there are others.

    What an estimate has wrong, it has wrong for all of these alike.
    """
    seen: collections.Counter = collections.Counter()
    first, rest = [], []
    for row in rows:
        alike = row.candidate.mesh, row.candidate["model.remat"]
        seen.update([alike])
        seen[row.candidate.mesh] += seen[alike] == 1
        is_new = seen[alike] == 1 and seen[row.candidate.mesh] <= _OF_A_MESH
        (first if is_new else rest).append(row)
    return [*first, *rest][:number]


def compile_rows(
    configs: Sequence[Config],
    slice_: Slice,
    rows: Sequence[Row],
    hbm_gib: float,
    vocab_size: int,
    on_progress: OnProgress,
) -> list[Row]:
    """`rows` with the compiler's answer and, where it fits, the predicted time.

    Args:
      configs: that each row's candidate is applied to.
    """
    done: list[CompileResult] = []

    def on_done(request: CompileRequest, result: CompileResult) -> None:
        done.append(result)
        on_progress("compiling", len(done), len(rows))

    on_progress("compiling", 0, len(rows))
    requests = [
        CompileRequest(row.candidate.apply(config).to_dict(), slice_.name, hbm_gib, vocab_size)
        for config, row in zip(configs, rows, strict=True)
    ]
    results = compile_all(requests, on_done=on_done)
    return [
        dataclasses.replace(row, result=result, prediction=predict(result, slice_))
        for row, result in zip(rows, results, strict=True)
    ]


def predict(result: CompileResult, slice_: Slice) -> TimePrediction | None:
    """The time of a compiled program; None where it did not compile."""
    if not result.fits:
        return None
    return predict_time(parse_hlo(read_hlo(result)), slice_)
