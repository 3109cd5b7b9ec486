"""Recorded figures of the shipped configurations: HBM, cycles and collectives of each train step.

A change of the code that moves one of them by more than 1% is seen in CI, which compiles a few of
the cases again; `run.py plan --update-goldens` compiles them all and records what it finds.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jaxtpu.config import load
from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.errors import EXIT_OK, UserError
from jaxtpu.hardware import parse_slice
from jaxtpu.plan.compile_cache import write_whole
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, libtpu_versions
from jaxtpu.plan.progress import OnProgress, progress
from jaxtpu.plan.search import predict

PATH = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "plans.json"
TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Case:
    """One train step.

    Attributes:
      config: path of the file.
      slice: name.
      fields: dotted names and the values that choose mesh, remat and so on.
      hbm_gib: budget of a device.
      in_ci: whether CI compiles it.
      figures: what was recorded, by version of libtpu.
    """

    config: str
    slice: str
    fields: dict[str, Any]
    hbm_gib: float
    in_ci: bool
    figures: dict[str, dict[str, Any]]

    @property
    def request(self) -> CompileRequest:
        config = load(self.config, [(name, str(value)) for name, value in self.fields.items()])
        vocab_size = make_tokenizer(config.data.tokenizer, config.data.separator).vocab_size
        return CompileRequest(config.to_dict(), self.slice, self.hbm_gib, vocab_size)

    def __str__(self) -> str:
        return " ".join([self.config, self.slice, *(f"{n}={v}" for n, v in self.fields.items())])


def read(path: pathlib.Path = PATH) -> list[Case]:
    """The recorded cases."""
    return [Case(**values) for values in json.loads(path.read_text())]


def measured(case: Case, result: CompileResult) -> dict[str, Any]:
    """The figures of a compiled case: bytes and cycles of a device, and its collectives.

    Raises:
      UserError: it did not compile.
    """
    prediction = predict(result, parse_slice(case.slice))
    if prediction is None:
        needs = f"it needs {result.needed_bytes} bytes" if result.needed_bytes else result.error
        raise UserError(f"{case}: does not fit into {case.hbm_gib:g} GiB: {needs}.")
    counted: dict[str, list[int]] = {}
    for kind, (runs, size) in sorted(prediction.communication.items()):
        counted[kind] = [runs, size]
    return {
        "hbm_bytes": result.hbm_bytes,
        "cycles": prediction.cycles,
        "collectives": counted,
        "step_seconds": prediction.step_seconds,
    }


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What moved by more than TOLERANCE, in words; another set of collectives is one too."""
    moved = []
    for name in ("hbm_bytes", "cycles"):
        change = found[name] / recorded[name] - 1
        if abs(change) > TOLERANCE:
            moved.append(f"{name} {recorded[name]:,} -> {found[name]:,} ({change:+.1%})")
    kinds = recorded["collectives"].keys() | found["collectives"].keys()
    for kind in sorted(kinds):
        was = recorded["collectives"].get(kind, [0, 0])
        now = found["collectives"].get(kind, [0, 0])
        if was[0] != now[0] or abs(now[1] - was[1]) > TOLERANCE * was[1]:
            moved.append(f"{kind} {was[0]} of {was[1]:,} bytes -> {now[0]} of {now[1]:,} bytes")
    return moved


def compile_cases(cases: Sequence[Case], on_progress: OnProgress) -> list[dict[str, Any]]:
    """The figures of each case, compiled now (or found in the cache of compiled programs)."""
    done: list[CompileResult] = []

    def on_done(request: CompileRequest, result: CompileResult) -> None:
        done.append(result)
        on_progress("compiling", len(done), len(cases))

    results = compile_all([case.request for case in cases], on_done=on_done)
    return [measured(case, result) for case, result in zip(cases, results, strict=True)]


def update(out: Console, path: pathlib.Path = PATH) -> int:
    """Compiles every case and records its figures under the installed version of libtpu.

    Returns:
      Exit code 0.

    Raises:
      UserError: a case does not compile; the file is as it was.
    """
    cases, version = read(path), libtpu_versions()["libtpu"]
    with progress(out, "goldens") as on_progress:
        figures_now = compile_cases(cases, on_progress)
    updated = []
    for case, found in zip(cases, figures_now, strict=True):
        before = case.figures.get(version)
        moved = differences(before, found) if before else ["first recorded"]
        out.print(f"{case}: {'; '.join(moved) or 'as before'}", markup=False, soft_wrap=True)
        figures = {**case.figures, version: found}
        updated.append(dataclasses.replace(case, figures=dict(sorted(figures.items()))))
    text = json.dumps([dataclasses.asdict(case) for case in updated], indent=1)
    write_whole(path, f"{text}\n".encode())
    out.print(f"Written: {path}", markup=False)
    return EXIT_OK
