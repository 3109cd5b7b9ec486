"""`mesh=auto`, without the compiler."""

import dataclasses
import io
import json

import jax
import pytest
from rich.console import Console

from jaxtpu.config import load
from jaxtpu.errors import ConfigError
from jaxtpu.plan import auto, compile_cache
from jaxtpu.plan.candidates import KNOBS, Candidate

TINY = "tests/configs/tiny.py"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where plans are kept; there is no compiler."""
    monkeypatch.setattr(compile_cache, "has_libtpu", lambda: False)
    monkeypatch.setattr(auto, "DIRECTORY", str(tmp_path))
    return tmp_path


def taken(given=frozenset(), overrides=()):
    config = load(TINY, [("mesh", "auto"), *overrides])
    out = Console(file=io.StringIO(), width=300)
    return auto.take_plan(config, set(given), jax.devices(), 257, out), out.file.getvalue()


def test_it_takes_a_plan_and_says_which(folder):
    config, said = taken()
    assert not config.mesh.auto
    assert "mesh=auto took, for v3-8: --config.mesh.data=" in said
    again, said = taken()
    assert again == config
    assert "estimating" not in said


def test_what_the_command_line_sets_stays_even_if_it_is_the_default(folder):
    free, _ = taken(overrides=[("model.remat", "full")])
    config, _ = taken({"model.remat"}, [("model.remat", "full")])
    assert config.model.remat == "full"
    assert free.model.remat != "full"


@pytest.mark.parametrize("text", ["[]", "{", '{"mesh": [1, 2], "knobs": []}'])
def test_a_damaged_file_is_made_again(folder, text):
    config, _ = taken()
    (kept,) = folder.glob("auto-*.json")
    kept.write_text(text)
    assert taken()[0] == config
    assert Candidate(**json.loads(kept.read_text())).knobs[0][0] == KNOBS[0]
    assert dataclasses.is_dataclass(config)


def test_several_processes_are_told_what_to_paste(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="Paste the line that `run.py plan` ends with"):
        taken()


def test_devices_that_are_no_slice_are_told(folder):
    with pytest.raises(ConfigError, match="mesh.emulate=4: .*Use 8 or 32"):
        auto.slice_of(jax.devices()[:4])
