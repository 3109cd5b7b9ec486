"""Evaluation: every example of a split exactly once, on any mesh."""

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxtpu.train.task import count_name


def evaluate(
    eval_step: Callable, params: Any, batches: Iterable[dict[str, jax.Array]], max_in_flight: int
) -> dict[str, float]:
    """Means over the real tokens of all `batches`, and `tokens`, how many those are; or over what
    else the task counts.

    Sums are kept per batch on the devices and added up on the host in double precision, so the
    result does not depend on how examples fall into batches. NaN without any batch.
    """
    totals: dict[str, float] = collections.defaultdict(float)
    in_flight: collections.deque = collections.deque()

    def add_oldest() -> None:
        for name, value in jax.device_get(in_flight.popleft()).items():
            totals[name] += float(value)

    for batch in batches:
        in_flight.append(eval_step(params, batch))
        if len(in_flight) > max_in_flight:
            add_oldest()
    while in_flight:
        add_oldest()
    unit = count_name(totals) if totals else "tokens"
    count = totals.pop(unit, 0.0)
    means = {name: total / count if count else math.nan for name, total in totals.items()}
    return {"loss": math.nan} | means | {unit: count}
