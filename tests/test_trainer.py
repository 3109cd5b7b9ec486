"""Whole runs through the command line: stop, resume, repeat, generate."""

import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxtpu import cli, closing, running
from jaxtpu.checkpoint import Checkpoints, hook, manifest
from jaxtpu.config import CheckpointConfig
from jaxtpu.observe.console import StepDisplay
from jaxtpu.observe.writer import MetricWriter
from jaxtpu.setup import locked
from tests.tiny import programs_on

ROOT = pathlib.Path(__file__).parents[1]

CONFIG = f"--config={pathlib.Path(__file__).parent / 'configs' / 'tiny.py'}"


def run(workdir, *words: str) -> int:
    return cli.main([CONFIG, f"--workdir={workdir}", *words])


def losses(workdir) -> dict[int, float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture
def stop_at(monkeypatch):
    """Sends this process a signal while a given step is shown."""
    original = StepDisplay.advance

    def arm(step: int, number: signal.Signals) -> None:
        def advance(self, at: int) -> None:
            original(self, at)
            if at == step:
                signal.raise_signal(number)

        monkeypatch.setattr(StepDisplay, "advance", advance)

    yield arm
    monkeypatch.undo()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(workdir, what was printed) of a run of 20 steps."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    assert run(workdir) == 0
    return workdir


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_run_stopped_at_step_7_resumes_bit_for_bit(
    number, uninterrupted, tmp_path, stop_at, capsys, monkeypatch
):
    stop_at(6, number)  # noticed after the step that follows
    assert run(tmp_path) == 128 + number
    printed = capsys.readouterr().out
    assert f"Stopped by {number.name} after step 7; everything is saved." in printed
    assert f"To resume: python run.py {CONFIG} --workdir={tmp_path}" in printed
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]
    monkeypatch.undo()
    assert run(tmp_path) == 0
    assert "restored step 7" in capsys.readouterr().out
    assert losses(tmp_path) == losses(uninterrupted)
    assert len(losses(tmp_path)) == 20


def test_signal_handlers_are_those_of_before(tmp_path, stop_at):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop_at(1, signal.SIGTERM)
    run(tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_finished_run_says_so_and_goes_on_when_it_is_made_longer(uninterrupted, capsys):
    before = losses(uninterrupted)
    assert run(uninterrupted) == 0
    printed = capsys.readouterr().out
    assert "This run is finished" in printed
    assert "--config.train.steps=40" in printed
    assert losses(uninterrupted) == before


def test_a_run_can_be_repeated_from_the_config_that_it_wrote(uninterrupted, tmp_path):
    words = [f"--config={uninterrupted / 'config.json'}", f"--workdir={tmp_path}"]
    assert cli.main([*words, "--config.train.steps=20"]) == 0
    assert losses(tmp_path) == losses(uninterrupted)


def test_another_model_does_not_enter_the_folder(uninterrupted, capsys):
    saved = (uninterrupted / "config.json").read_text()
    assert run(uninterrupted, "--config.model.mlp=128") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model.mlp=128: ") and "64" in error
    assert (uninterrupted / "config.json").read_text() == saved


def test_generate_writes_text_from_the_checkpoint(uninterrupted, capsys):
    words = ["generate", f"--workdir={uninterrupted}", "--prompt=def ", "--tokens=5"]
    assert cli.main(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert cli.main(words) == 0
    assert capsys.readouterr().out == first
    assert cli.main([*words[:2], f"--prompt={'x' * 32}"]) == 2
    assert "at most 31" in capsys.readouterr().err


def test_the_closing_table_has_what_a_user_needs(tmp_path, capsys):
    assert run(tmp_path, "--config.train.steps=3", "--config.metrics=accuracy") == 0
    printed = capsys.readouterr().out
    for pattern in (
        r"mesh +data=2 x fsdp=2 x expert=1 x context=1 x tensor=2",
        r"training +loss [\d.]+, [\d.]+ bits/byte, accuracy",
        r"validation +loss [\d.]+, [\d.]+ bits/byte, accuracy",
        r"look-up tables +[\d.]+ bits/byte \(unigram\), [\d.]+ bits/byte \(bigram\)",
        r"speed +[\d,]+ tokens/s",
        r"memory +[\d.]+ \w+ a device",
        r"To generate: python run.py generate --workdir=",
        r"a sample:",
    ):
        assert re.search(pattern, printed), pattern
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())  # the last 2 and the best 1
    state = {"x": jax.numpy.arange(8.0)}
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
        checkpoints.save(step, state, {"examples": step, "seed": 0}, loss)
    checkpoints.wait()
    assert checkpoints.kept == "2, 4, 5"
    checkpoints.close()


def test_a_checkpoint_restores_onto_another_mesh(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())
    before = programs_on({"fsdp": 8}).init()
    checkpoints.save(3, before, {"examples": 48, "seed": 0}, None)
    checkpoints.wait()
    target = programs_on({"data": 2, "tensor": 4}).abstract_state
    after, position = checkpoints.restore(target)
    params = checkpoints.restore_params(target.params)
    checkpoints.close()
    assert position == {"examples": 48, "seed": 0}
    for old, new, wanted in zip(*map(jax.tree.leaves, (before, after, target)), strict=True):
        assert new.sharding == wanted.sharding
        np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(params), jax.device_get(after.params)
    )


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, capsys):
    words = ("--config.optimizer.learning_rate=1e30", "--config.optimizer.clip_norm=0")
    assert run(tmp_path, *words) == 1
    error = capsys.readouterr().err
    assert re.match(r"error: the (loss|grad_norm) is (nan|inf)", error)
    assert "learning_rate (now 1e+30)" in error


def test_of_a_damaged_checkpoint_the_one_before_is_taken(tmp_path, capsys):
    words = ("--config.train.steps=4", "--config.checkpoint.every=2")
    assert run(tmp_path, *words) == 0
    for path in (tmp_path / "checkpoints" / "4" / "data").iterdir():
        path.unlink()
    capsys.readouterr()
    assert run(tmp_path, "--config.train.steps=6") == 0
    printed = capsys.readouterr().out
    assert re.search(r"WARNING: the checkpoint of step 4 is damaged: data/\S+ is missing", printed)
    assert "restored step 2" in printed
    assert (tmp_path / "checkpoints" / "4.damaged").is_dir()
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]


def test_where_no_checkpoint_is_whole_the_run_does_not_begin_again(tmp_path, capsys):
    assert run(tmp_path, "--config.train.steps=2") == 0
    for path in (tmp_path / "checkpoints" / "2" / "data").iterdir():
        path.unlink()
    assert run(tmp_path, "--config.train.steps=6") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: no checkpoint in ")
    assert "those of steps 2 were saved" in error


def test_a_run_whose_last_save_fails_ends_with_5_and_goes_on_before(tmp_path, capsys, monkeypatch):
    def full(*_arguments, **_keywords):
        raise OSError(errno.ENOSPC, "No space left on device", "there")

    attempt = hook.SaveHook._attempt

    def attempt_to_the_end(self, progress):
        attempt(self, progress)
        assert self._checkpoints.idle_within(60)

    monkeypatch.setattr(hook.SaveHook, "_attempt", attempt_to_the_end)
    monkeypatch.setattr(manifest, "write_part", full)
    monkeypatch.setattr(hook.time, "sleep", lambda _: None)
    assert run(tmp_path, "--config.train.steps=4", "--config.checkpoint.every=2") == 5
    told = capsys.readouterr()
    assert "could not save the checkpoint of step 4" in told.err
    assert "No space left on device" in told.err
    assert "Training goes on; the next try is in 10 s" in told.out
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b'{"step": 3, "train/lo', b"\xff\xfe\n", b"5\n", b"[]\n"])
def test_a_damaged_metrics_file_loses_only_what_is_damaged(damage, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train/loss": 2.0}\n' + damage)
    MetricWriter(str(tmp_path), start=5).close()
    assert losses(tmp_path) == {1: 2.0}


def test_a_run_that_breaks_down_keeps_its_good_checkpoints(tmp_path, capsys):
    assert run(tmp_path, "--config.train.steps=4") == 0
    words = ("--config.optimizer.learning_rate=1e30", "--config.optimizer.clip_norm=0")
    assert run(tmp_path, "--config.train.steps=12", "--config.checkpoint.every=1", *words) == 1
    capsys.readouterr()
    assert "4" in Checkpoints(str(tmp_path), CheckpointConfig()).kept.split(", ")


def test_clipping_and_decay_can_be_switched_off_in_a_resumed_run(tmp_path):
    assert run(tmp_path, "--config.train.steps=2") == 0
    words = ("--config.optimizer.clip_norm=0", "--config.optimizer.weight_decay=0")
    assert run(tmp_path, "--config.train.steps=4", *words) == 0


def test_the_command_to_train_longer_works_for_a_run_of_epochs(tmp_path, capsys):
    words = ("--config.train.steps=None", "--config.train.epochs=2")
    assert run(tmp_path, *words, "--config.train.steps_per_epoch=1") == 0
    command = re.search(r"To train longer: python run.py (.*)", capsys.readouterr().out)[1]
    assert cli.main(command.split()) == 0
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


def test_a_signal_in_an_evaluation_ends_it_at_once(tmp_path, monkeypatch, capsys):
    evaluate = running.evaluate

    def signalled(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments)

    monkeypatch.setattr(running, "evaluate", signalled)
    assert run(tmp_path, "--config.train.evaluate_every=3") == 128 + signal.SIGTERM
    assert "validation loss" not in capsys.readouterr().out
    assert list(losses(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "words",
    [["--seed=-1"], ["--temperature=nan"], ["--prompt=\udcff"], ["--tokens=abc"], ["--seed=1e30"]],
)
def test_generate_refuses_what_it_cannot_do(words, uninterrupted, capsys):
    assert cli.main(["generate", f"--workdir={uninterrupted}", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {words[0].split('=')[0]}=")


def test_a_folder_whose_name_hides_checkpoints_is_refused(tmp_path, capsys):
    assert run(tmp_path / "run[1]") == 2
    assert "--workdir=" in capsys.readouterr().err


def test_a_second_run_is_kept_out_of_the_folder(tmp_path, capsys):
    with locked(str(tmp_path)):
        assert run(tmp_path) == 2
        assert "another run is in this folder" in capsys.readouterr().err
    assert run(tmp_path, "--config.train.steps=1") == 0


def test_a_compile_cache_that_cannot_be_written_is_told(tmp_path, capsys):
    assert run(tmp_path, "--config.compile_cache=/proc/none") == 2
    assert capsys.readouterr().err.startswith("error: compile_cache='/proc/none': cannot be")


def test_a_locale_without_the_characters_of_a_sample_ends_no_run(uninterrupted):
    words = [sys.executable, "run.py", "generate", f"--workdir={uninterrupted}", "--prompt=\u00e9"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"?")


OOM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 9.1G of 8G.\nmore"


@pytest.mark.parametrize(
    ("where", "program"),
    [("evaluate", "evaluation"), ("train_loop", "training"), ("generate", None)],
)
def test_out_of_memory_is_told_with_the_program_and_without_a_traceback(
    where, program, tmp_path, monkeypatch, capsys
):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(OOM if program else "INTERNAL: something else")

    monkeypatch.setattr(closing if where == "generate" else running, where, fail)
    if program is None:  # another fault is not called a lack of memory
        with pytest.raises(jax.errors.JaxRuntimeError):
            run(tmp_path, "--config.train.steps=2")
        return
    assert run(tmp_path, "--config.train.steps=2") == 1
    told = capsys.readouterr()
    assert f"error: out of memory in {program}: RESOURCE_EXHAUSTED: Ran out" in told.err
    assert "train.microbatches" in told.out
