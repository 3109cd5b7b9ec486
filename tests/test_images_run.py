"""A run of a vision model by the command line, and what is said of one that cannot be."""

import json

import pytest

from jaxtpu import cli

TINY = ["--config=configs/digits_mlp.py", "--config.mesh.emulate=8", "--config.model.embed=32",
        "--config.sharding.max_replicated=1", "--config.data.batch_size=64",
        "--config.images.mixup=0.2", "--config.train.epochs=None", "--config.train.steps=6",
        "--config.train.log_every=2", "--config.train.evaluate_every=0"]  # fmt: skip


def test_a_run_resumes_and_says_what_an_override_saves(tmp_path, capsys):
    folder = f"--workdir={tmp_path / 'run'}"
    assert cli.main([*TINY, folder, "--config.train.steps=4"]) == 0
    printed = capsys.readouterr().out
    assert "parameters 2.41 k" not in printed and "beside the file" in printed
    assert cli.main([*TINY, folder]) == 0
    assert "4 steps done" in capsys.readouterr().out
    values = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    evaluated = [line for line in values if "validation/examples" in line]
    assert evaluated and all(line["validation/examples"] == 360 for line in evaluated)


def test_a_loss_that_is_not_finite_names_the_images(tmp_path, capsys):
    words = ["--config.optimizer.learning_rate=1e30", "--config.optimizer.clip_norm=0"]
    assert cli.main([*TINY, *words, f"--workdir={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert "so the run has stopped" in error and "its examples: digits " in error
    assert cli.main(["debug-step", f"--workdir={tmp_path}"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config.model.vision.patch=3", "--config.model.name=mixer"], "Use 2."),
        (["--config.data.source=python_corpus"], "Use digits"),
        (["--config.data.source=folder:/nowhere"], "is not a folder"),
        (["--config.data.validation_split=test"], "validation"),
        (["--config.model.vision.image_size=0"], "Use 1."),
        (["--config.model.vision.classes=3"], "Use 10, or 0"),
        (["--config.mesh=auto"], "mesh.data=1"),
        (["--config.data.batch_size=6"], "Use 8."),
    ],
)
def test_a_wrong_field_is_told_with_what_works(words, told, tmp_path, capsys):
    assert cli.main([*TINY, *words, f"--workdir={tmp_path}"]) == 2
    assert told in capsys.readouterr().err


def test_plan_says_that_it_is_for_text(capsys):
    assert cli.main(["plan", "--config=configs/digits_vit.py", "--slice=v3-8"]) == 2
    assert "models of text" in capsys.readouterr().err
