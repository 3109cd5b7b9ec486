"""Why a program does not fit: its largest tensors in words, and changes that were compiled and fit."""

import collections
import copy
import dataclasses
from typing import Any

from rich.console import Console

from jaxtpu.config import Config, RunUnits, leaves
from jaxtpu.hardware import Slice
from jaxtpu.plan.breakdown import MemoryReport, amount, explain_memory
from jaxtpu.plan.candidates import Candidate, candidates
from jaxtpu.plan.compiler import CompileRequest, compile_all
from jaxtpu.plan.estimate import estimate, estimates
from jaxtpu.plan.progress import OnProgress
from jaxtpu.plan.search import Row, compile_rows, varied

_GIB = 2**30
_MOST_CHANGES, _COMPILES = 5, 7
_SAFE = 0.85  # of a budget: an estimate within it has never failed to compile
# What helps besides the fields of a candidate, which are tried anyway.
_OTHER_CHANGES = (
    {"optimizer.name": "adafactor"},
    {"precision.params": "bfloat16"},
)


@dataclasses.dataclass(frozen=True)
class Change:
    """Fields that make it fit.

    Attributes:
      fields: dotted names with their new values.
      row: compiled with them.
      seconds_per_token: predicted.
    """

    fields: dict[str, Any]
    row: Row
    seconds_per_token: float

    @property
    def flags(self) -> str:
        return " ".join(f"--config.{name}={value}" for name, value in self.fields.items())


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Of a train step that does not fit.

    Attributes:
      candidate: that it was to run as.
      note: what was compiled in its place, to see inside; or why nothing was.
      memory: of that program; None if there is none.
      changes: that fit, the least predicted time first.
    """

    candidate: Candidate
    note: str
    memory: MemoryReport | None
    changes: list[Change]


def explain(
    config: Config,
    candidate: Candidate,
    slice_: Slice,
    units: RunUnits,
    *,
    hbm_gib: float,
    vocab_size: int,
    on_progress: OnProgress,
) -> Explanation:
    """Looks into the train step of `config` run as `candidate`, and for what would fit.

    Args:
      config: without a mesh, as `plan_slice` takes it.
    """
    note, memory = _look_inside(config, candidate, slice_, units, vocab_size, on_progress)
    pairs = _alternatives(config, candidate, slice_, units, hbm_gib, on_progress)
    before = _fields(candidate.apply(config))
    changes = []
    configs, rows = [config for config, _ in pairs], [row for _, row in pairs]
    done = compile_rows(configs, slice_, rows, hbm_gib, vocab_size, on_progress)
    for changed, row in zip(configs, done, strict=True):
        if row.fits:
            after = _fields(row.candidate.apply(changed))
            fields = {name: value for name, value in after.items() if value != before[name]}
            tokens = changed.data.batch_size * changed.data.sequence_length
            changes.append(Change(fields, row, row.seconds / tokens))
    changes.sort(key=lambda change: change.seconds_per_token)
    return Explanation(candidate, note, memory, changes[:_MOST_CHANGES])


def _fields(config: Config) -> dict[str, Any]:
    return dict(leaves(config))


def _look_inside(
    config: Config,
    candidate: Candidate,
    slice_: Slice,
    units: RunUnits,
    vocab_size: int,
    on_progress: OnProgress,
) -> tuple[str, MemoryReport | None]:
    """The program compiled where it fits: with all of the device's memory, or with fewer layers.

    The compiler gives no program that needs more than the device has.
    """
    physical, layers = slice_.generation.hbm_gib, config.model.layers
    deepest = _layers_that_fit(config, candidate, slice_, units, _SAFE * physical * _GIB)
    for depth in dict.fromkeys([layers, deepest, 1]):
        on_progress("looking inside what does not fit", 0, 1)
        shallow = candidate.apply(config)
        shallow.model.layers = depth
        request = CompileRequest(shallow.to_dict(), slice_.name, physical, vocab_size)
        result = compile_all([request])[0]
        if result.fits:
            note = f"compiled with all {physical:g} GiB of the device"
            if depth < layers:
                note = (
                    f"compiled with {depth} of its {layers} layers, for the whole is too large for "
                    f"the device: what is stacked over layers is {layers / depth:.3g} times as large"
                )
            return note, explain_memory(result)
        if result.error:
            return f"it does not compile at all: {result.error}", None
    return "even one layer of it is too large for the device", None


def _layers_that_fit(
    config: Config, candidate: Candidate, slice_: Slice, units: RunUnits, limit: float
) -> int:
    """By arithmetic: bytes are linear in the number of layers."""
    layers = config.model.layers
    one = copy.deepcopy(config)
    one.model.layers = 1
    least = estimate(one, candidate, slice_, units).hbm_bytes
    most = estimate(config, candidate, slice_, units).hbm_bytes
    if most <= limit or layers == 1:
        return layers
    return max(1, min(layers, int((limit - least) / (most - least) * (layers - 1)) + 1))


def _alternatives(
    config: Config,
    candidate: Candidate,
    slice_: Slice,
    units: RunUnits,
    hbm_gib: float,
    on_progress: OnProgress,
) -> list[tuple[Config, Row]]:
    """(configuration, candidate) pairs that fit by arithmetic, the most promising ones."""
    limit = hbm_gib * _GIB
    held = {f"mesh.{axis}" for axis in ("expert", "context")}
    found = [c for c in candidates(candidate.apply(config), slice_, held) if c != candidate]
    guesses = estimates(config, found, slice_, units, on_progress)
    rows = [Row(c, e) for c, e in zip(found, guesses, strict=True) if e.hbm_bytes <= limit]
    others = []
    halves = [{"data.batch_size": size} for size in _smaller_batches(config, candidate)]
    for fields in (*_OTHER_CHANGES, *halves):
        changed = copy.deepcopy(config)
        changed.update(fields)
        row = Row(candidate, estimate(changed, candidate, slice_, units))
        if fields.items() - _fields(config).items() and row.estimate.hbm_bytes <= limit:
            others.append((changed, row))
    room = _COMPILES - len(others[:3])
    rows = varied(sorted(rows, key=lambda row: row.seconds), room)
    return [(config, row) for row in rows] + others[:3]


def _smaller_batches(config: Config, candidate: Candidate) -> list[int]:
    """Halves of the batch that the mesh and the microbatches still divide."""
    parts = candidate["train.microbatches"]
    for axis in filter(None, (axis.strip() for axis in config.sharding.batch.split(","))):
        parts *= candidate.sizes[axis]
    size, found = config.data.batch_size, []
    while size % (2 * parts) == 0:
        size //= 2
        found.append(size)
    return found


def show_explanation(console: Console, explanation: Explanation, hbm_gib: float) -> None:
    """Prints the largest tensors and the changes."""
    say = lambda text: console.print(text, markup=False, soft_wrap=True)  # noqa: E731
    memory = explanation.memory
    say(f"\nWhy {explanation.candidate} does not fit ({explanation.note}):")
    if memory:
        say(f"  {amount(memory.hbm_bytes)} at the peak: {memory.peak_at}")
        for words, count in collections.Counter(t.words for t in memory.largest).items():
            say(f"  {words}" if count == 1 else f"  {count} times {words}")
    if not explanation.changes:
        say("No change was found that fits.")
        return
    say(f"Changes that were compiled and fit into {hbm_gib:g} GiB, the fastest first:")
    for change in explanation.changes:
        gib, speed = change.row.result.hbm_bytes / _GIB, 1 / change.seconds_per_token
        say(f"  {gib:.2f} GiB, {speed:,.0f} tokens/s predicted: {change.flags}")
