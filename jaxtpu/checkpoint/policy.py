"""Which checkpoints are kept."""

import dataclasses
import math
from collections.abc import Mapping

HIGHER_IS_BETTER = ("accuracy",)


@dataclasses.dataclass(frozen=True)
class Retention:
    """A checkpoint is kept if any of these wants it.

    Attributes:
      last: the newest so many.
      every: multiples of so many steps; 0 for none.
      best: so many with the best `metric` besides.
      metric: of the validation split.
    """

    last: int
    every: int = 0
    best: int = 0
    metric: str = "loss"

    def dropped(self, ranked: Mapping[int, float | None]) -> list[int]:
        """The steps that are not kept.

        Args:
          ranked: the metric of each checkpoint, by step; None where it was not evaluated.
        """
        steps = sorted(ranked)
        keep = set(steps[len(steps) - self.last :]) | set(steps[-1:])
        keep |= {step for step in steps if self.every and step % self.every == 0}
        known = [step for step in steps if ranked[step] is not None]
        keep |= set(sorted(known, key=lambda step: (self._worse(ranked[step]), -step))[: self.best])
        return [step for step in steps if step not in keep]

    def _worse(self, value: float) -> float:
        """What is sorted by, the best first; NaN would leave them in any order."""
        if not math.isfinite(value):
            return math.inf
        return -value if self.metric in HIGHER_IS_BETTER else value
