"""Numbers that go wrong in a whole run: stop with a dump that can be replayed, skip, rollback."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from jaxtpu import cli, debug, running
from jaxtpu.checkpoint import Checkpoints
from jaxtpu.config import CheckpointConfig, load
from jaxtpu.data.order import Position
from jaxtpu.setup import set_up, train_loader
from tests.test_trainer import CONFIG, losses, run

BATCH = 8  # of the config


@pytest.fixture
def poison(monkeypatch):
    """Makes the weights of some global batches, by their number from 0, not a number."""

    def arm(*numbers: int) -> None:
        def poisoned(setup, position):
            loader = train_loader(setup, position)
            take = loader._prefetcher.__next__
            count = itertools.count(position.examples // BATCH)

            def make():
                batch = take()
                if next(count) in numbers:
                    return batch | {"weights": batch["weights"].at[2].set(jnp.nan)}
                return batch

            loader._prefetcher = Changed(loader._prefetcher, make)
            return loader

        monkeypatch.setattr(running, "train_loader", poisoned)

    yield arm
    monkeypatch.undo()


class Changed:
    """A prefetcher whose batches are changed on the way."""

    def __init__(self, inner, make):
        self._inner, self._make = inner, make

    def __next__(self):
        return self._make()

    def __getattr__(self, name):
        return getattr(self._inner, name)


def metrics(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def examples_after(workdir) -> int:
    checkpoints = Checkpoints(str(workdir), CheckpointConfig())
    position = Position.from_json(checkpoints.read_position(checkpoints.newest_whole()))
    checkpoints.close()
    return position.examples


def test_stop_names_the_step_the_path_and_the_examples_and_dumps_what_can_be_replayed(
    poison, tmp_path, capsys
):
    poison(6)
    assert run(tmp_path, "--config.checkpoint.every=5") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the loss is nan at step 7, so the run has stopped.\n")
    assert "not finite first: gradient of decoder/" in error
    assert "Traceback" not in error
    assert f"checkpoints in {tmp_path}/checkpoints: 5" in error
    setup = set_up(load(str(tmp_path / "config.json")))
    count = setup.stream.examples(32)
    ids = [
        int(n) for n in error.split("its examples: ")[1].splitlines()[0].split(" ", 1)[1].split(",")
    ]
    assert len(ids) == len(set(ids)) == BATCH and max(ids) < count
    with train_loader(setup, Position(6 * BATCH, 0)) as loader:
        read = next(loader)[0]
    wanted = setup.stream.example_batch(jnp.array(ids), 32)["inputs"]
    assert (jnp.asarray(read["inputs"]) == wanted).all(), "the examples are not those of the batch"

    assert cli.main(["debug-step", f"--workdir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "step 7 again" in printed and "gradient of decoder/" in printed
    assert "nan" in printed
    words = ["debug-step", f"--workdir={tmp_path}", "--config.precision.compute=float32"]
    assert cli.main(words) == 0


def test_a_run_that_stopped_goes_on_from_before(poison, tmp_path, monkeypatch, capsys):
    poison(6)
    assert run(tmp_path, "--config.checkpoint.every=5") == 1
    monkeypatch.undo()
    capsys.readouterr()
    assert run(tmp_path, "--config.checkpoint.every=5") == 0
    assert "restored step 5" in capsys.readouterr().out
    assert sorted(losses(tmp_path)) == list(range(1, 21))


def test_nothing_is_saved_where_the_last_step_went_wrong(poison, tmp_path, capsys):
    poison(19)
    assert run(tmp_path) == 1
    assert "checkpoints: none" in capsys.readouterr().err


def test_skip_drops_the_updates_and_counts_them(poison, tmp_path, capsys):
    poison(3, 6, 7)
    assert run(tmp_path, "--config.guard.nonfinite=skip", "--config.train.log_every=5") == 0
    dropped = {line["step"]: line.get("train/dropped_updates") for line in metrics(tmp_path)}
    assert {step: count for step, count in dropped.items() if count} == {5: 1, 10: 2}
    assert all(line["train/loss"] < 10 for line in metrics(tmp_path) if "train/loss" in line)
    assert "dropped 2" in capsys.readouterr().out
    assert examples_after(tmp_path) == 20 * BATCH


def test_skip_stops_after_the_limit_in_a_row(poison, tmp_path, capsys):
    poison(3, 6, 7, 8)
    assert run(tmp_path, "--config.guard.nonfinite=skip", "--config.guard.limit=3") == 1
    error = capsys.readouterr().err
    assert "the loss is nan at step 9" in error and "after 3 updates in a row" in error


def test_an_interval_without_a_single_update_is_told(poison, tmp_path):
    poison(5)
    assert run(tmp_path, "--config.guard.nonfinite=skip") == 0
    (line,) = [line for line in metrics(tmp_path) if line["step"] == 6 and "train/tokens" in line]
    assert "train/loss" not in line and line["train/dropped_updates"] == 1


def test_rollback_goes_back_and_past_the_batches(poison, tmp_path, capsys):
    poison(6)
    words = ["--config.guard.nonfinite=rollback", "--config.checkpoint.every=5"]
    assert run(tmp_path, *words) == 0
    printed = capsys.readouterr().out
    assert "WARNING: the loss is nan at step 7: back to step 5, and past the batches" in printed
    assert "restored step 5" in printed
    assert sorted(losses(tmp_path)) == list(range(1, 21)), "each step stands once"
    assert examples_after(tmp_path) == 22 * BATCH, "two batches were given up: 6 and 7"


def test_rollback_without_a_checkpoint_begins_anew(poison, tmp_path, capsys):
    poison(2)
    assert run(tmp_path, "--config.guard.nonfinite=rollback") == 0
    assert "back to step 0" in capsys.readouterr().out
    assert examples_after(tmp_path) == 23 * BATCH


def test_rollback_ends_where_it_does_not_help(poison, tmp_path, capsys):
    poison(*range(6, 100))
    words = ["--config.guard.nonfinite=rollback", "--config.guard.limit=2"]
    assert run(tmp_path, *words, "--config.checkpoint.every=5") == 1
    captured = capsys.readouterr()
    assert captured.out.count("WARNING: the loss is nan") == 2
    assert "so the run has stopped" in captured.err
    assert f"checkpoints in {tmp_path}/checkpoints: 5" in captured.err


def test_debug_step_without_a_dump(tmp_path, capsys):
    assert run(tmp_path, "--config.train.steps=1") == 0
    assert cli.main(["debug-step", f"--workdir={tmp_path}"]) == 1
    assert "holds no dump" in capsys.readouterr().err


def test_a_dump_that_cannot_be_written_is_told(poison, tmp_path, capsys):
    poison(6)
    (tmp_path / "debug").write_text("a file where the folder would be")
    assert run(tmp_path) == 1
    error = capsys.readouterr().err
    assert "could not be written" in error and "the loss is nan at step 7" in error
    assert (tmp_path / "debug").is_file()


def test_the_dump_is_there_even_where_the_step_cannot_be_looked_at(
    poison, tmp_path, capsys, monkeypatch
):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    poison(6)
    with monkeypatch.context() as patched:
        patched.setattr(debug, "examine", fail)
        assert run(tmp_path, f"--config.checkpoint.directory={tmp_path / 'elsewhere'}") == 1
    error = capsys.readouterr().err
    assert "the loss is nan at step 7" in error
    assert "looking failed: RESOURCE_EXHAUSTED: out of memory" in error
    assert f"are in {tmp_path}/elsewhere/debug" in error
    assert cli.main(["debug-step", f"--workdir={tmp_path}"]) == 0


def test_debug_step_takes_the_config_of_the_run_alone(poison, tmp_path, capsys):
    poison(6)
    assert run(tmp_path) == 1
    assert cli.main(["debug-step", f"--workdir={tmp_path}", CONFIG]) == 2
    assert "--config" in capsys.readouterr().err
