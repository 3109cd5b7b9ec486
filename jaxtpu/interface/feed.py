"""An epoch's batches on their way to the step, and its numbers on their way back."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from jaxtpu.data.prefetch import Prefetcher
from jaxtpu.interface.batches import passes, split
from jaxtpu.train.loop import Clock, Progress

_READY = 2  # batches kept on the devices ahead of the step


class Feed:
    """Batches on the devices, made ahead of the step in a thread.

    Args:
      dataset: see `passes`.
      to_device: (inputs, labels, weights) -> a batch on the devices.
    """

    def __init__(self, dataset: Any, to_device: Callable[[tuple], dict[str, Any]]):
        self._to_device, self._passes = to_device, passes(dataset)
        self._current: Prefetcher | None = None

    def epoch(self, steps: int | None):
        """(batch, None) for so many batches, or to the end of a pass."""
        given, empty = 0, False
        while steps is None or given < steps:
            if self._current is None:
                source = next(self._passes, None)
                if source is None or empty:
                    return
                self._current = Prefetcher(functools.partial(iter, source), self._placed, _READY)
                empty = True
            for batch in self._current:
                given, empty = given + 1, False
                yield batch, None
                if given == steps:
                    return
            self.close()
            if steps is None:
                return

    def _placed(self, batch: Any) -> dict[str, Any]:
        return self._to_device(split(batch, labelled=True))

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


class Means:
    """Means over an epoch's examples; the numbers of a step are fetched when it is finished."""

    def __init__(self):
        self.clock, self._waiting, self._totals, self._count = Clock(), [], {}, 0.0

    def add(self, progress: Progress) -> None:
        self._waiting.append((progress.step, progress.metrics))
        self._fetch(progress.clock.completed_step)

    def _fetch(self, completed: int) -> None:
        while self._waiting and self._waiting[0][0] <= completed:
            values = jax.device_get(self._waiting.pop(0)[1])
            count = float(values.pop("examples"))
            self._count += count
            for name in values.keys() - {"grad_norm", "learning_rate"}:
                self._totals[name] = self._totals.get(name, 0.0) + float(values[name]) * count

    def result(self) -> dict[str, float]:
        self._fetch(sys.maxsize)
        means = {name: total / max(self._count, 1e-30) for name, total in self._totals.items()}
        return {"loss": means.pop("loss")} | dict(sorted(means.items()))
