"""What a plan leaves behind: `plan.json`, `report.html`, and a picture of each slice's memory."""

import dataclasses
import pathlib
from collections.abc import Sequence

from jaxtpu.plan.compile_cache import has_compiler, libtpu_versions, write_whole
from jaxtpu.plan.explain import Explanation
from jaxtpu.plan.page import SliceSection, write_page
from jaxtpu.plan.pictures import TimeBar, time_png, timeline_png
from jaxtpu.plan.programs import Programs
from jaxtpu.plan.report import Workload, figures, over_budget, summary, write_json
from jaxtpu.plan.search import Row, SlicePlan

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Finding:
    """All that is known of one slice.

    Attributes:
      plan: candidates.
      work: what they are to do.
      programs: of the best; None if nothing fits.
      explanation: why nothing fits; None if something does.
    """

    plan: SlicePlan
    work: Workload
    programs: Programs | None
    explanation: Explanation | None


def write(folder: pathlib.Path, name: str, findings: Sequence[Finding]) -> list[pathlib.Path]:
    """Writes everything into `folder`; returns the paths, the page first."""
    versions = libtpu_versions() if has_compiler() else {}
    folder.mkdir(parents=True, exist_ok=True)
    sections, written = [], []
    for finding in findings:
        picture = _timeline(finding)
        if picture:
            written.append(folder / f"memory-{finding.plan.slice.name}.png")
            write_whole(written[-1], picture)
        sections.append(_section(finding, picture))
    page = folder / "report.html"
    write_page(page, sections, title=name, versions=versions, notes=_notes(findings))
    found = {"versions": versions, "memory": [_memory_json(finding) for finding in findings]}
    write_json(folder / "plan.json", [f.plan for f in findings], [f.work for f in findings], found)
    return [page, folder / "plan.json", *written]


def _timeline(finding: Finding) -> bytes:
    report = finding.programs.train if finding.programs else None
    report = report or (finding.explanation.memory if finding.explanation else None)
    if report is None:
        return b""
    best = finding.plan.best
    title = (
        f"{finding.plan.slice.name}: {best.candidate if best else finding.explanation.candidate}"
    )
    return timeline_png(report, finding.plan.hbm_gib * _GIB, title)


def _section(finding: Finding, picture: bytes) -> SliceSection:
    plan, explanation = finding.plan, finding.explanation
    predicted = [row for row in plan.rows if row.prediction]
    report = finding.programs.train if finding.programs else None
    reasons = over_budget(plan)
    if explanation:
        reasons.append(f"{explanation.candidate} was looked into: {explanation.note}.")
        reasons += [f"It would fit with {change.flags}" for change in explanation.changes]
        report = explanation.memory
    return SliceSection(
        name=plan.slice.name,
        summary=summary(plan),
        rows=[figures(plan, row, finding.work) for row in plan.rows],
        reasons=reasons,
        command=plan.best.candidate.flags() if plan.best else "",
        memory=finding.programs.rows if finding.programs else (),
        report=report,
        timeline_png=picture,
        time_png=time_png([_bar(row) for row in predicted], "Predicted") if predicted else b"",
    )


def _bar(row: Row) -> TimeBar:
    waiting = {"exposed communication": row.prediction.exposed_seconds}
    return TimeBar(str(row.candidate), {**row.prediction.seconds, **waiting})


def _notes(findings: Sequence[Finding]) -> list[str]:
    notes = [f"{findings[0].work.tokens:,.0f} tokens to train on."]
    for finding in findings:
        price = finding.work.price
        told = (
            f"${price.usd:g} a chip-hour ({price.date}, {price.source})" if price else "not known"
        )
        notes.append(f"Price of {finding.plan.slice.generation.name}: {told}.")
    return list(dict.fromkeys(notes))


def _memory_json(finding: Finding) -> dict:
    """Of the best candidate: each program's row, and the train step explained."""
    programs, explanation = finding.programs, finding.explanation
    train = programs.train if programs else None
    return {
        "slice": finding.plan.slice.name,
        "programs": [dataclasses.asdict(row) for row in programs.rows] if programs else [],
        "train": train.to_json() if train else None,
        "changes_that_fit": [change.fields for change in explanation.changes]
        if explanation
        else [],
    }
