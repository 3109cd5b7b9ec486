"""Figures of shipped configurations: what moves them by more than 1% is seen here."""

import dataclasses
import io

import pytest
from rich.console import Console

from jaxtpu.errors import UserError
from jaxtpu.plan import goldens
from jaxtpu.plan.breakdown import explain_memory
from jaxtpu.plan.compiler import CompileResult, compile_all, libtpu_versions

RECORDED = {"hbm_bytes": 1000, "cycles": 1000, "collectives": {"all-gather": [3, 600]}}


@pytest.fixture(scope="module")
def compiled():
    """(case, answer) of those that CI compiles."""
    cases = [case for case in goldens.read() if case.in_ci]
    return list(zip(cases, compile_all([case.request for case in cases]), strict=True))


@pytest.mark.tpu_compile
def test_recorded_train_steps_compile_to_the_same(compiled):
    version = libtpu_versions()["libtpu"]
    for case, result in compiled:
        assert version in case.figures, f"new to libtpu {version}: run.py plan --update-goldens"
        moved = goldens.differences(case.figures[version], goldens.measured(case, result))
        assert not moved, f"{case}: {moved}; if that is meant: run.py plan --update-goldens"


@pytest.mark.tpu_compile
def test_the_timeline_peaks_within_3_percent_of_the_compiler(compiled):
    for case, result in compiled:
        assert abs(explain_memory(result).unexplained_fraction) < 0.03, case


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"hbm_bytes": 1009, "cycles": 991}, []),
        ({"hbm_bytes": 1011}, ["hbm_bytes 1,000 -> 1,011 (+1.1%)"]),
        ({"cycles": 980}, ["cycles 1,000 -> 980 (-2.0%)"]),
        (
            {"collectives": {"all-gather": [4, 600]}},
            ["all-gather 3 of 600 bytes -> 4 of 600 bytes"],
        ),
        (
            {"collectives": {"all-gather": [3, 600], "all-reduce": [1, 8]}},
            ["all-reduce 0 of 0 bytes -> 1 of 8 bytes"],
        ),
        ({"collectives": {}}, ["all-gather 3 of 600 bytes -> 0 of 0 bytes"]),
    ],
)
def test_differences_of_more_than_a_hundredth_are_told(change, told):
    assert goldens.differences(RECORDED, RECORDED | change) == told


def test_a_case_that_does_not_fit_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    path.write_text(goldens.PATH.read_text())
    refused = CompileResult(needed_bytes=9 * 2**30)
    monkeypatch.setattr(goldens, "compile_all", lambda requests, on_done: [refused] * len(requests))
    monkeypatch.setattr(goldens, "libtpu_versions", lambda: {"libtpu": "1"})
    before = path.read_bytes()
    with pytest.raises(UserError, match="does not fit into 8 GiB"):
        goldens.update(Console(file=io.StringIO()), path)
    assert path.read_bytes() == before


def test_figures_of_another_version_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    path.write_text(goldens.PATH.read_text())
    found = RECORDED | {"step_seconds": 1.0}
    monkeypatch.setattr(goldens, "compile_cases", lambda cases, on: [found] * len(cases))
    monkeypatch.setattr(goldens, "libtpu_versions", lambda: {"libtpu": "99"})
    before = goldens.read(path)
    goldens.update(Console(file=io.StringIO()), path)
    for old, new in zip(before, goldens.read(path), strict=True):
        assert new.figures == {**old.figures, "99": found}
        assert dataclasses.replace(new, figures={}) == dataclasses.replace(old, figures={})
