"""Evaluation of a run's checkpoint: a split, source by source, or a task of multiple choice."""

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.closing import tokens_per_byte
from jaxtpu.config import Config
from jaxtpu.data.mixture import Mixture
from jaxtpu.errors import EXIT_OK, ConfigError
from jaxtpu.observe import console as screen
from jaxtpu.scoring import choose_all, read_questions
from jaxtpu.setup import Setup, set_up, validation_batches
from jaxtpu.train.evaluate import evaluate
from jaxtpu.train.task import count_name

RESULTS = "evaluations.jsonl"


def evaluate_run(config: Config, split: str | None, task: str | None) -> int:
    """Evaluates the newest whole checkpoint of the run in `config.workdir`, prints a table, and
    adds a line to its `evaluations.jsonl`.

    Args:
      split: of the data; None for `data.validation_split`.
      task: file of multiple-choice questions, instead of a split: see `read_questions`.

    Raises:
      ConfigError: there is no checkpoint, no split, or the task's file cannot be read.
    """
    if split is not None and task is not None:
        raise ConfigError("--split", split, "is given beside --task.", "Give one of the two.")
    config.data.validation_split = split or config.data.validation_split or "validation"
    config.train.evaluate_batches = 0
    config.metrics = ("accuracy", "top_5")
    out, questions = screen.make_console(), read_questions(task) if task else None
    setup = set_up(config)
    step, variables = _restored(setup)
    started = time.perf_counter()
    if questions is not None:
        with screen.busy(out, f"scored {len(questions)} questions"):
            results = {task: choose_all(setup, variables, questions)}
    else:
        with screen.busy(out, f"evaluated {config.data.validation_split}"):
            results = _by_source(setup, variables)
    what = task or f"{config.data.validation_split} split"
    title = f"{config.name}, step {step}: {what}, {time.perf_counter() - started:.1f} s"
    screen.table(out, title, [(name, _words(values)) for name, values in results.items()])
    path = pathlib.Path(config.workdir).expanduser() / RESULTS
    line = {"step": step, "split": None if task else config.data.validation_split, "task": task}
    with path.open("a") as file:
        file.write(json.dumps(line | {"results": results}) + "\n")
    return EXIT_OK


def _restored(setup: Setup) -> tuple[int, Any]:
    """(step, what evaluation is run with) of the newest whole checkpoint."""
    checkpoints = Checkpoints(setup.config.workdir, setup.config.checkpoint)
    try:
        step = checkpoints.newest_whole(set_aside=False)
        if step is None:
            raise ConfigError(
                "--workdir", setup.config.workdir, "holds no checkpoint.", "Train first."
            )
        return step, checkpoints.restore_evaluated(setup.programs.abstract_state, step)
    finally:
        checkpoints.close()


def _by_source(setup: Setup, variables: Any) -> dict[str, dict[str, float]]:
    """Means over all that counts, for each source of a mixture and for all of them."""
    whole = setup.validation
    parts = {"all": whole}
    if isinstance(whole, Mixture):
        parts = dict(zip(whole.names, whole.streams, strict=True))
    results = {}
    for name, part in parts.items():
        batches = validation_batches(dataclasses.replace(setup, validation=part))
        means = evaluate(
            setup.programs.eval_step, variables, batches, setup.config.train.max_steps_in_flight
        )
        results[name] = means | _derived(means, part)
    if len(parts) > 1:
        results["all"] = _together(list(results.values()))
    return results


def _derived(means: dict[str, float], part: Any) -> dict[str, float]:
    """Perplexity, and bits a byte where all of the text is known and learned."""
    if count_name(means) != "tokens":
        return {}
    bits = means["loss"] / math.log(2) * tokens_per_byte(part)
    return {"perplexity": _exp(means["loss"])} | (
        {"bits_per_byte": bits} if math.isfinite(bits) else {}
    )


def _together(results: list[dict[str, float]]) -> dict[str, float]:
    """Of several sources: each token counts once. Bits a byte are those of a source alone."""
    count = sum(result["tokens"] for result in results)
    means = {
        name: sum(result[name] * result["tokens"] for result in results) / count
        for name in ("loss", "accuracy", "top_5")
    }
    return means | {"tokens": count, "perplexity": _exp(means["loss"])}


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _words(values: dict[str, float]) -> str:
    unit = next(name for name in ("tokens", "examples", "questions") if name in values)
    order = ("loss", "perplexity", "bits_per_byte", "accuracy", "top_5", "accuracy_by_byte")
    shown = [f"{name.replace('_', ' ')} {values[name]:.4f}" for name in order if name in values]
    return f"{', '.join(shown)} over {values[unit]:,.0f} {unit}"
