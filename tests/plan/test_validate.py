"""Validation: the published rows hold together, the table's arithmetic, and the fit on data whose
constants are known. Nothing is compiled here."""

import io
import random

import pytest
from rich.console import Console

from jaxtpu.config import Config
from jaxtpu.hardware import parse_slice
from jaxtpu.plan import validate as validation
from jaxtpu.plan.calibrate import (
    GRID,
    fit,
    make_constants,
    median_absolute,
    rank_correlation,
    values_of,
)
from jaxtpu.plan.compile_cache import CompileResult
from jaxtpu.plan.playback import CONSTANTS
from jaxtpu.plan.published import ROWS, Published
from jaxtpu.plan.validate import Comparison, compare, finalized, show, show_fit, validate
from tests.plan.snippets import ARRAY, module

V3_8 = {"slice": "v3-8", "mesh": {"fsdp": 8}, "remat": "full", "source": "https://example.org"}
TINY = {"vocab_size": 384, "embed": 128, "layers": 2, "heads": 2, "mlp": 256}


def tiny(**more) -> Published:
    return Published("tiny", model=TINY, sequences=8, sequence_length=64, **V3_8, **more)


def printed(function, *arguments) -> str:
    out = Console(file=io.StringIO(), width=200)
    function(out, *arguments)
    return out.file.getvalue()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.slice}")
def test_every_row_is_a_setting_for_its_slice(row):
    config = finalized(row)
    assert 0.2 < row.published_mfu(config) < 0.8
    assert (row.mfu is None) != (row.step_seconds is None)
    assert row.source.startswith("https://")
    assert config.data.batch_size % parse_slice(row.slice).slices == 0
    again = Config()
    again.update(config.to_dict())
    assert again.to_dict() == config.to_dict()


def test_rows_are_told_apart():
    assert len({(row.name, row.slice) for row in ROWS}) == len(ROWS)


def test_sizes_are_those_that_the_names_promise():
    billions = {"GPT-2 6.7B": 6.7, "GPT-2 65B": 65, "MaxText 52B": 52, "MaxText 128B": 128}
    for row in ROWS:
        if row.name in billions:
            config = finalized(row).model
            heads = 2 * (config.heads + config.kv_heads) * config.head_dim
            layer = config.embed * (heads + 3 * config.mlp)
            weights = config.layers * layer + config.embed * config.vocab_size
            assert weights / 1e9 == pytest.approx(billions[row.name], rel=0.04)


def test_mfu_of_a_step():
    row = tiny(mfu=0.5)
    config = finalized(row)
    layer = 4 * 128 * 128 + 3 * 128 * 256
    per_token = 6 * (2 * layer + 128 * 384) + 12 * 2 * 128 * 64
    peak = 8 * 61.5e12
    assert row.mfu_at(1e-3, config) == pytest.approx(per_token * 8 * 64 / 1e-3 / peak)
    assert row.published_mfu(config) == 0.5
    timed = tiny(step_seconds=1e-3)
    assert timed.published_mfu(config) == row.mfu_at(1e-3, config)


def test_a_row_that_compiled_and_one_that_did_not():
    row = tiny(mfu=0.5)
    config = finalized(row)
    program = module(f"%p = {ARRAY} parameter(0)\nROOT %s = {ARRAY} sort(%p), dimensions={{0}}")
    result = CompileResult(fits=True, hbm_bytes=3 * 2**30)
    made = compare(row, config, result, program)
    assert made.step_seconds == pytest.approx(2 * 2**20 / 450e9)
    assert made.predicted == row.mfu_at(made.step_seconds, config)
    assert made.error == made.predicted / 0.5 - 1
    assert (made.hbm_gib, made.exposed) == (3.0, 0.0)
    failed = compare(row, config, CompileResult(needed_bytes=20 * 2**30), None)
    assert failed.predicted is None and failed.reason == "needs 20.0 GiB a device"
    assert compare(row, config, CompileResult(error="refused"), None).reason == "refused"


def test_the_table_and_its_summary():
    rows = [tiny(mfu=mfu, assumed="a guess") for mfu in (0.4, 0.5, 0.6, 0.5)]
    predicted = (0.44, 0.40, 0.60, None)
    made = [
        Comparison(row, row.mfu, mfu, 0.1, 0.25, 7.5)
        if mfu
        else Comparison(row, row.mfu, reason="too large")
        for row, mfu in zip(rows, predicted, strict=True)
    ]
    text = printed(show, made)
    assert "40.0%" in text and "44.0%" in text and "+10%" in text and "-20%" in text
    assert "1, 2, 3: a guess <https://example.org>" in text
    assert "4: no prediction: too large; a guess <https://example.org>" in text
    assert "3 of 4 settings predicted: median absolute error 10.0%, rank correlation 0.50" in text


def synthetic(truth, rows: int, noise: float):
    """Errors of rows whose speed follows the constants `truth`, in different proportions."""
    chance = random.Random(0)

    def row():
        product, link = chance.uniform(0.5, 1), chance.uniform(0.1, 0.5)
        seconds = lambda v: product / v[0] + link / v[1]  # noqa: E731
        measured = seconds(truth) * (1 + chance.uniform(-noise, noise))
        return lambda constants: measured / seconds(values_of(constants)) - 1

    return [row() for _ in range(rows)]


def test_the_fit_finds_the_constants_that_made_the_data():
    truth = tuple(choices[2] for choices in GRID.values())
    found = fit(synthetic(truth, rows=12, noise=0.0))
    assert values_of(found.constants) == truth
    assert median_absolute(found.errors) == pytest.approx(0, abs=1e-12)
    assert median_absolute(found.left_out) == pytest.approx(0, abs=1e-12)


def test_a_row_left_out_does_not_choose_its_own_constants():
    truth = tuple(choices[2] for choices in GRID.values())
    rows = synthetic(truth, rows=8, noise=0.05)
    strange = lambda constants: 0.5 * constants.product_efficiency  # noqa: E731
    found = fit([*rows, strange])
    assert values_of(found.constants)[0] == truth[0]
    assert found.left_out[-1] == pytest.approx(0.5 * truth[0])
    assert len(found.left_out) == len(found.errors) == 9
    assert median_absolute(found.left_out) < 0.06


def test_constants_are_on_the_grid_and_back():
    values = values_of(CONSTANTS)
    assert make_constants(values) == CONSTANTS
    for value, choices in zip(values, GRID.values(), strict=True):
        assert value in choices


def test_rank_correlation():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)


def test_the_fit_is_printed_beside_the_constants_in_use():
    truth = tuple(choices[2] for choices in GRID.values())
    text = printed(show_fit, fit(synthetic(truth, rows=12, noise=0.0)))
    assert "PRODUCT_EFFICIENCY" in text and "LINK_EFFICIENCY" in text
    assert "with the best of all others: 0.0%" in text


def test_nothing_compiled_ends_with_an_exit_code(monkeypatch):
    def refuse(requests, *, workers, on_done):
        assert workers == 1 and {r.program for r in requests} == {"train"}
        assert {r.hbm_gib for r in requests if r.slice == "v3-256"} == {16.0}
        for request in requests:
            on_done(request, None)
        return [CompileResult(error="no") for _ in requests]

    monkeypatch.setattr(validation, "compile_all", refuse)
    out = Console(file=io.StringIO(), width=200)
    assert validate(out) == 1
    assert "no prediction: no" in out.file.getvalue()
