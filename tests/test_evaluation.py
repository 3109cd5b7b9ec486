"""`run.py evaluate`: a split, or questions, by a run's checkpoint; exact on any mesh."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest

from jaxtpu import cli
from jaxtpu.scoring import Scorer
from jaxtpu.setup import Setup
from jaxtpu.train.evaluate import evaluate
from tests.tiny import LENGTH, fixed_batch, programs_on, put

CONFIG = f"--config={pathlib.Path(__file__).parent / 'configs' / 'tiny.py'}"
METRICS = ("accuracy", "top_5")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    words = ["--config.train.steps=4", "--config.train.evaluate_batches=0"]
    assert cli.main([CONFIG, f"--workdir={folder}", *words]) == 0
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_a_split_is_evaluated_as_the_run_evaluated_it(trained, capsys):
    assert cli.main(["evaluate", f"--workdir={trained}"]) == 0
    assert "perplexity" in capsys.readouterr().out
    line = lines(trained)[-1]
    values = [json.loads(text) for text in (trained / "metrics.jsonl").read_text().splitlines()]
    told = next(value for value in reversed(values) if "validation/loss" in value)
    result = line["results"]["all"]
    assert line["step"] == 4 and line["split"] == "validation"
    assert result["loss"] == pytest.approx(told["validation/loss"], rel=1e-6)
    assert result["tokens"] == told["validation/tokens"]
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] > 0 and 0 <= result["accuracy"] <= result["top_5"] <= 1


def test_another_split_is_evaluated(trained):
    assert cli.main(["evaluate", f"--workdir={trained}", "--split=train[:2%]"]) == 0
    assert lines(trained)[-1]["split"] == "train[:2%]"


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_accuracies_are_those_of_the_logits_on_any_mesh(sizes):
    programs = programs_on(sizes, metrics=METRICS)
    params, batch = programs.init().params, fixed_batch()
    found = evaluate(programs.eval_step, params, [put(programs, batch)], 2)
    with programs.rules.active():
        logits = np.asarray(jax.jit(programs.model.apply)(params, put(programs, batch)))
    real, targets = batch["weights"] > 0, batch["targets"]
    rank = (logits > np.take_along_axis(logits, targets[..., None], -1)).sum(-1)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == targets)[real].mean())
    assert found["top_5"] == pytest.approx((rank < 5)[real].mean())


class Letters:
    """A tokenizer that joins "ab"."""

    document_start, vocab_size = 256, 257

    def encode(self, text):
        return np.array([ord(c) for c in text.replace("ab", "\x01")], np.int64)


@pytest.fixture(scope="module")
def scorer():
    programs, config = programs_on({"data": 2, "fsdp": 2, "tensor": 2}, with_config=True)
    params = programs.init().params
    return Scorer(Setup(config, Letters(), None, None, None, programs), params), programs, params


def alone(programs, params, ids, counted):
    """Log-likelihood of the last `counted` of `ids`, by the logits of one row."""
    batch = {name: np.zeros((16, LENGTH), np.int32) for name in ("inputs", "segment_ids")}
    batch["positions"] = np.tile(np.arange(LENGTH, dtype=np.int32), (16, 1))
    batch["inputs"][:, : len(ids) - 1] = ids[:-1]
    batch["segment_ids"][:, : len(ids) - 1] = 1
    logits = jax.jit(programs.model.apply)(params, batch)
    each = np.asarray(jax.nn.log_softmax(logits[0]))[np.arange(len(ids) - 1), ids[1:]]
    return each[-counted:].sum()


def test_likelihoods_are_those_of_each_text_alone(scorer):
    score, programs, params = scorer
    cases = {
        ("hello", " you"): ([256, *map(ord, "hello you")], 4),
        ("", "x"): ([256, ord("x")], 1),
        ("xa", "bc"): ([256, ord("x"), 1, ord("c")], 2),  # a and b are one token
        ("z" * 40, "yy"): ([ord("z")] * (LENGTH - 1) + [ord("y")] * 2, 2),  # the end of it
    }
    many = list(cases) * 5  # more than a batch
    found = score.score(many)
    for pair, (value, greedy) in zip(many, found, strict=True):
        ids, counted = cases[pair]
        assert value == pytest.approx(alone(programs, params, np.array(ids), counted), rel=1e-5)
        assert isinstance(greedy, bool)


def test_questions_are_answered_by_likelihood(trained, tmp_path, capsys):
    file = tmp_path / "task.jsonl"
    file.write_text(
        '{"question": "def f(x", "choices": ["):", "\\u00e9\\u00e9"], "answer": 0}\n\n'
        '{"question": "import ", "choices": ["\\u00e9\\u00e9\\u00e9", "os"], "answer": 1}\n'
    )
    assert cli.main(["evaluate", f"--workdir={trained}", f"--task={file}"]) == 0
    assert "accuracy 1.0000" in capsys.readouterr().out
    assert lines(trained)[-1]["results"][str(file)]["questions"] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no question"),
        ("{", "line 1 is no question"),
        ('{"question": "a", "choices": ["b"], "answer": 0}', "line 1 is no question"),
        ('\n{"question": "a", "choices": ["b", "c"], "answer": 2}', "line 2 is no question"),
        ('{"question": "a", "choices": ["b", ""], "answer": 0}', "line 1 is no question"),
    ],
)
def test_a_task_that_is_none_is_told(trained, tmp_path, capsys, text, told):
    file = tmp_path / "task.jsonl"
    file.write_text(text)
    assert cli.main(["evaluate", f"--workdir={trained}", f"--task={file}"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--split=nowhere"], "validation_split"),
        (["--task=/nowhere.jsonl"], "cannot be read"),
        (["--split=train", "--task=x"], "Give one of the two"),
    ],
)
def test_what_cannot_be_evaluated_is_told(trained, capsys, words, told):
    assert cli.main(["evaluate", f"--workdir={trained}", *words]) == 2
    assert told in capsys.readouterr().err
