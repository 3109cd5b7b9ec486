"""Two things timed by turns in one process, so that a noisy machine troubles both alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one run of something took: wall seconds, and CPU seconds of this whole process."""

    wall: float
    cpu: float


def measure(run: Callable[[], None]) -> Cost:
    """The cost of one run; `run` returns only when its work is done."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def interleave(
    a: Callable[[], None], b: Callable[[], None], seconds: float
) -> list[tuple[Cost, Cost]]:
    """The costs of `a` and `b`, run by turns (a b, b a, a b, ...) for some `seconds`.

    Both are run once before that, and four times at least, however slow they are.
    """
    a()
    b()
    costs, end = [], time.perf_counter() + seconds
    while len(costs) < 4 or time.perf_counter() < end:
        if len(costs) % 2:
            second = measure(b)
            first = measure(a)
        else:
            first = measure(a)
            second = measure(b)
        costs.append((first, second))
    return costs


def report(
    name_a: str, name_b: str, costs: list[tuple[Cost, Cost]], *, bar: float, steps: int = 1
) -> bool:
    """Prints medians a step, the ratio a / b, and how it stands to the bar.

    Args:
      costs: of pairs of runs.
      bar: the largest ratio of wall time that will do.
      steps: steps in each run.

    Returns:
      False where the ratio is above the bar, beyond what chance explains.
    """
    print(f"{len(costs)} pairs of {steps} step(s); medians, in brackets the quartiles")
    for kind in ("cpu", "wall"):
        a, b = ([getattr(pair[i], kind) / steps for pair in costs] for i in (0, 1))
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        low, high = confidence(ratios)
        print(f"  {kind}: {name_a} {spread(a)} s, {name_b} {spread(b)} s a step")
        print(
            f"  {kind} ratio: {statistics.median(a) / statistics.median(b):.3f} of medians, "
            f"median of pairwise ratios {spread(ratios)}, 95% within {low:.3f} to {high:.3f}"
        )
    result = "met" if high <= bar else "NOT met" if low > bar else "not decided by so noisy a run"
    print(f"{name_a} / {name_b}: {statistics.median(ratios):.3f} (bar {bar}: {result})")
    return low <= bar


def spread(values: list[float]) -> str:
    """`median [lower quartile, upper quartile]`."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def confidence(values: list[float]) -> tuple[float, float]:
    """Between these two the true median lies in 95 of 100 cases (order statistics)."""
    ordered, count = sorted(values), len(values)
    reach = 0.98 * count**0.5
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]
