"""Likelihoods of texts by a model, and answers to questions of multiple choice by them.

Dimensions: B rows, T positions, V vocabulary (padded).
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtpu.data.batch import batch_spec
from jaxtpu.errors import ConfigError
from jaxtpu.kernels.cross_entropy import cross_entropy
from jaxtpu.setup import Setup

_EXAMPLE = '{"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, texts that may follow it, and the number of the right one, from 0."""

    question: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str) -> list[Question]:
    """The questions of a JSON-lines file: `question`, `choices` and `answer`, the number of the
    right choice from 0. Choices follow the question directly, so most begin with a space.

    Raises:
      ConfigError: it is no such file; names the line.
    """
    file = pathlib.Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            "--task", path, f"cannot be read: {reason}.", f"A line: {_EXAMPLE}"
        ) from None
    questions = [_question(path, n, text) for n, text in enumerate(lines, 1) if text.strip()]
    if not questions:
        raise ConfigError("--task", path, "holds no question.", f"A line: {_EXAMPLE}")
    return questions


def _question(path: str, number: int, line: str) -> Question:
    try:
        value = json.loads(line)
        found = Question(value["question"], tuple(value["choices"]), value["answer"])
        right = (
            isinstance(found.question, str)
            and len(found.choices) > 1
            and all(isinstance(choice, str) and choice for choice in found.choices)
            and type(found.answer) is int
            and 0 <= found.answer < len(found.choices)
        )
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise ConfigError("--task", path, f"line {number} is no question.", f"A line: {_EXAMPLE}")
    return found


class Scorer:
    """Log-likelihoods of continuations, in nats, by a model on its mesh.

    Args:
      setup: of the run.
      variables: what evaluation is run with: see `TrainState.evaluated`.
    """

    def __init__(self, setup: Setup, variables: Any):
        self._setup, self._variables = setup, variables
        model, rules = setup.programs.model, setup.programs.rules
        if setup.tokenizer is None or model.task != "next_token":
            raise ConfigError(
                "--workdir", setup.config.workdir, "holds no model that predicts next tokens.",
                "Name the folder of a language model.",
            )  # fmt: skip

        def score(params, batch):
            with rules.active():
                logits_BTV = model.apply(params, batch)
            losses_BT = cross_entropy(logits_BTV, batch["targets"]) * batch["weights"]
            right_BT = jnp.argmax(logits_BTV, axis=-1) == batch["targets"]
            greedy_B = jnp.all(right_BT | (batch["weights"] == 0), axis=-1)
            return -jnp.sum(losses_BT, axis=-1), greedy_B

        replicated = jax.sharding.NamedSharding(rules.mesh, jax.sharding.PartitionSpec())
        self._score = jax.jit(score, out_shardings=replicated)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether each of its tokens is the likeliest) of each
        (context, continuation).

        A context that does not fit the model's sequence loses its beginning.

        Raises:
          ConfigError: a continuation alone does not fit.
        """
        size = self._setup.config.data.batch_size
        rows = [self._row(context, text) for context, text in pairs]
        results = []
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            batch = self._batch(some, size)
            sums, greedy = jax.device_get(self._score(self._variables, batch))
            results += list(
                zip(sums[: len(some)].tolist(), greedy[: len(some)].tolist(), strict=True)
            )
        return results

    def _row(self, context: str, text: str) -> tuple[np.ndarray, int]:
        """(tokens, how many of them are the continuation's): tokenised together, as they stand."""
        tokenizer, length = self._setup.tokenizer, self._setup.config.data.sequence_length
        before = tokenizer.encode(context)
        whole = tokenizer.encode(context + text)
        # Where the context's last token would merge with the text, it counts as the text's.
        shared = min(len(before), len(whole))
        differing = np.flatnonzero(before[:shared] != whole[:shared])
        start = int(differing[0]) if differing.size else shared
        counted = len(whole) - start
        if counted > length:
            raise ConfigError(
                "--task", text[:40], f"has {counted} tokens; the model sees {length}.",
                f"Use choices of at most {length} tokens.",
            )  # fmt: skip
        ids = np.concatenate([[tokenizer.document_start], whole])
        return ids[-(length + 1) :].astype(np.int32), counted

    def _batch(self, rows: list[tuple[np.ndarray, int]], size: int) -> dict[str, jax.Array]:
        spec = batch_spec(size, self._setup.config.data.sequence_length)
        arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in spec.items()}
        for row, (ids, counted) in enumerate(rows):
            count = len(ids) - 1
            arrays["inputs"][row, :count] = ids[:-1]
            arrays["targets"][row, :count] = ids[1:]
            arrays["segment_ids"][row, :count] = 1
            arrays["positions"][row, :count] = np.arange(count)
            arrays["weights"][row, count - counted : count] = 1.0
        shardings = {n: leaf.sharding for n, leaf in self._setup.programs.abstract_batch.items()}
        return {
            name: jax.make_array_from_callback(array.shape, shardings[name], array.__getitem__)
            for name, array in arrays.items()
        }


def choose_all(setup: Setup, variables: Any, questions: Sequence[Question]) -> dict[str, float]:
    """`accuracy` of the likeliest choices, `accuracy_by_byte` of those likeliest for their length,
    and `questions`, their number."""
    pairs = [(q.question, choice) for q in questions for choice in q.choices]
    scores = iter(Scorer(setup, variables).score(pairs))
    right = right_by_byte = 0
    for question in questions:
        likelihoods = np.array([next(scores)[0] for _ in question.choices])
        lengths = np.array([len(choice.encode()) for choice in question.choices])
        right += int(np.argmax(likelihoods)) == question.answer
        right_by_byte += int(np.argmax(likelihoods / lengths)) == question.answer
    count = len(questions)
    return {
        "accuracy": right / count,
        "accuracy_by_byte": right_by_byte / count,
        "questions": count,
    }
