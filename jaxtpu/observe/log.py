"""The log hook: the metrics of every step, fetched once the devices have finished them."""

import collections
import dataclasses
import math
from collections.abc import Callable

import jax

from jaxtpu.train.loop import Progress
from jaxtpu.train.task import count_name


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants that turn a loss and a time into what people compare.

    Attributes:
      tokens_per_byte: tokens of the training text per byte of it; NaN where it is not known.
      flops_per_token: training FLOPs a token, without recomputation.
      peak_flops: of all devices together; None where it is not known.
    """

    tokens_per_byte: float
    flops_per_token: float
    peak_flops: float | None

    def bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) * self.tokens_per_byte


@dataclasses.dataclass
class _Interval:
    first: int  # the step before it
    last: int
    metrics: list[dict[str, jax.Array]]


class LogHook:
    """Averages metrics over `interval` steps and hands them to `emit(step, values)`; steps whose
    update was dropped are counted, and left out of the averages.

    An interval is fetched when its last step is known to be finished, a few steps later, so
    fetching never waits for the devices.
    """

    def __init__(
        self,
        interval: int,
        start: int,
        rates: Rates,
        wait_seconds: Callable[[], float],
        emit: Callable[[int, dict[str, float]], None],
    ):
        self._interval, self._rates, self._emit = max(1, interval), rates, emit
        self._wait_seconds, self._waited = wait_seconds, 0.0
        self._open = _Interval(start, start, [])
        self._closed: collections.deque[_Interval] = collections.deque()

    def __call__(self, progress: Progress) -> None:
        self._open.metrics.append(progress.metrics)
        self._open.last = progress.step
        ending = progress.last or progress.stopping
        if progress.step % self._interval == 0 or ending:
            self._closed.append(self._open)
            self._open = _Interval(progress.step, progress.step, [])
        self.flush(progress)

    def flush(self, progress: Progress) -> None:
        """Emits the intervals whose steps are all known to be finished."""
        while self._closed and self._closed[0].last <= progress.clock.completed_step:
            self._write(self._closed.popleft(), progress)

    def _write(self, interval: _Interval, progress: Progress) -> None:
        fetched = jax.device_get(interval.metrics)
        unit = count_name(fetched[0])
        counts = [float(metrics[unit]) for metrics in fetched]
        total = sum(count for count in counts if math.isfinite(count))
        made = [metrics for metrics in fetched if not metrics["dropped"]]
        tokens = sum(float(metrics[unit]) for metrics in made)
        names = [name for name in fetched[0] if name not in (unit, "learning_rate", "dropped")]
        values = {
            f"train/{name}": sum(float(metrics[name]) * float(metrics[unit]) for metrics in made)
            / max(tokens, 1.0)
            for name in names
            if made
        }
        if len(made) < len(fetched):
            values["train/dropped_updates"] = len(fetched) - len(made)
        values["train/learning_rate"] = float(fetched[-1]["learning_rate"])
        if made and math.isfinite(self._rates.tokens_per_byte):
            values["train/bits_per_byte"] = self._rates.bits_per_byte(values["train/loss"])
        values[f"train/{unit}"] = total
        values |= self._speed(interval, unit, total, progress)
        self._emit(interval.last, values)

    def _speed(
        self, interval: _Interval, unit: str, tokens: float, progress: Progress
    ) -> dict[str, float]:
        """Nothing for the first interval of a process: its start was not timed."""
        seconds = progress.clock.seconds(interval.first, interval.last)
        waited = self._wait_seconds() - self._waited
        self._waited += waited
        if not seconds:
            return {}
        rate = tokens / seconds
        speed = {
            "speed/step_seconds": seconds / (interval.last - interval.first),
            f"speed/{unit}_per_second": rate,
            "speed/input_wait_fraction": min(1.0, waited / seconds),
        }
        if self._rates.peak_flops:
            speed["speed/mfu"] = rate * self._rates.flops_per_token / self._rates.peak_flops
        return speed
