"""`run.py plan`, as a user runs it."""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxtpu import cli
from jaxtpu.config import load
from jaxtpu.errors import ConfigError
from jaxtpu.hardware import parse_slice
from jaxtpu.plan import command, compile_cache

ROOT = pathlib.Path(__file__).parents[2]
TINY = str(ROOT / "tests" / "configs" / "tiny.py")


def start(cwd, *words: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "plan", *words],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(folder, standard output, standard error, exit code)."""
    folder = tmp_path_factory.mktemp("planned")
    process = start(folder, f"--config={TINY}", "--slice=v3-8,v5e-8", "--compiles=1",
                    "--open=mesh", "--tokens=1e9")  # fmt: skip
    out, err = process.communicate(timeout=600)
    return folder, out, err, process.returncode


class TestCompiled:
    pytestmark = pytest.mark.tpu_compile

    def test_it_ends_well_and_quietly(self, planned):
        _, out, err, code = planned
        assert code == 0, err
        assert err == ""
        for noise in ("WARNING", "E0000", "libtpu.so"):
            assert noise not in out

    def test_each_slice_ends_with_the_line_to_paste(self, planned):
        _, out, _, _ = planned
        lines = [line for line in out.splitlines() if line.startswith("Use: --config.mesh.data=")]
        assert len(lines) == 2
        assert "The slices, the cheapest first" in out

    def test_the_folder_has_a_page_a_picture_and_the_figures(self, planned):
        folder = planned[0] / "plans" / "tiny"
        names = {path.name for path in folder.iterdir()}
        assert names == {"report.html", "plan.json", "memory-v3-8.png", "memory-v5e-8.png"}
        written = json.loads((folder / "plan.json").read_text())
        for slice_, memory in zip(written["slices"], written["memory"], strict=True):
            assert slice_["best"]["fits"] and slice_["best"]["kind"] == "predicted"
            programs = {row["what"] for row in memory["programs"]}
            assert {"init", "train", "evaluate", "restore", "save"} <= programs
            parts = memory["train"]["parts"].values()
            assert sum(parts) == memory["train"]["hbm_bytes"]
            assert memory["train"]["hbm_bytes"] == slice_["best"]["hbm_gib"] * 2**30
        page = (folder / "report.html").read_text()
        assert "v3-8" in page and "v5e-8" in page and slice_["best"]["flags"] in page


@pytest.mark.tpu_compile
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="no /proc")
def test_ctrl_c_stops_the_workers(tmp_path):
    home = {**os.environ, "HOME": str(tmp_path)}  # nothing is cached there
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also in a background
    process = start(tmp_path, f"--config={TINY}", "--slice=v3-8", env=home, preexec_fn=heard)
    while "compiling" not in process.stdout.readline():
        assert process.poll() is None
    deadline = time.monotonic() + 60
    while not (workers := children(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == (
        "Interrupted; what was compiled is kept, and the same command goes on from there."
    )
    assert not [pid for pid in workers if pathlib.Path(f"/proc/{pid}").exists()]


def children(pid: int) -> list[str]:
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [child for path in tasks for child in path.read_text().split()]


def test_without_the_compiler_the_estimate_is_told_as_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile_cache, "has_libtpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", f"--config={TINY}", "--slice=v3-8"]) == 0
    out = capsys.readouterr().out
    assert "ESTIMATES ONLY" in out and "libtpu, for Linux on x86-64" in out
    written = json.loads((tmp_path / "plans" / "tiny" / "plan.json").read_text())
    assert {row["kind"] for row in written["slices"][0]["rows"]} == {"estimated"}
    assert written["versions"] == {}
    assert "Nothing was compiled" in (tmp_path / "plans" / "tiny" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--slice=v3-8"], "--config='': is missing"),
        ([f"--config={TINY}"], "--slice='': is missing. For example: --slice=v3-8"),
        ([f"--config={TINY}", "--slice=v3-9"], "slice='v3-9': .* Use v3-8 or v3-32"),
        ([f"--config={TINY}", "--slice=v3-8,"], "slice='': not a TPU slice"),
        ([f"--config={TINY}", "--slice=v3-8", "--hbm_gib=17"], "has 16 GiB. Use at most 16"),
        ([f"--config={TINY}", "--slice=v3-8", "--hbm_gib=-1"], "--hbm_gib=-1.0: must be positive"),
        ([f"--config={TINY}", "--slice=v3-8", "--compiles=0"], "--compiles=0: must be positive"),
        ([f"--config={TINY}", "--slice=v3-8", "--open=remat"], "--open='remat': .*model.remat"),
        ([f"--config={TINY}", "--slice=v3-8", "--config.mesh.data=3"], "mesh='.*data=3.*--open"),
        ([f"--config={TINY}", "--slice=v3-8", "--config.data.batch_size=7"], "batch_size=7: "),
        ([f"--config={TINY}", "--slice=v3-8", "--config.mesh.fsdp=0"], "mesh.fsdp=0: "),
        (
            [f"--config={TINY}", "--slice=v3-8", "--config.mesh.data=-1", "--config.mesh.fsdp=-1"],
            "mesh.fsdp=-1: only one axis",
        ),
        ([f"--config={TINY}", "--slice=v3-8", "--hbm_gib=1e-9"], "Use at most 16, and 1 MiB"),
        ([f"--config={TINY}", "--slice=v3-8", "--config.name=../x"], "name='../x': .*a path"),
        (
            [f"--config={ROOT}/configs/llama2_7b.py:lion", "--slice=v3-8"],
            "no variant 'lion': use host or",
        ),
        (["--validate", "--slice=v3-8"], "--validate takes nothing beside it"),
        ([f"--config={TINY}", "--slices=v3-8"], "--slices.*Did you mean '--slice'"),
    ],
)
def test_bad_command_lines_end_with_code_2(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and len(err.splitlines()) == 1

    assert re.search(told, err), err
    assert not (tmp_path / "plans").exists()


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "plans").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", f"--config={TINY}", "--slice=v3-8"]) == 2
    assert "plans is not a folder that can be written" in capsys.readouterr().err


def test_tokens_give_a_length_to_a_run_of_epochs():
    config = load(TINY, [("train.steps", "None"), ("train.epochs", "3")])
    ready, units = command.without_mesh(config, parse_slice("v3-8"), 257, tokens=1e6)
    assert units.steps == round(1e6 / units.tokens_per_step)
    with pytest.raises(ConfigError, match="size of the data set is not known"):
        command.without_mesh(config, parse_slice("v3-8"), 257)
