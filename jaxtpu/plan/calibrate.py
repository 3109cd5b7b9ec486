"""Fits the constants of the time model to measurements, and says how far the fit can be trusted.

A few constants, with one value for all measurements, over a coarse grid of values that are
physically possible: the figures come from other people's programs, and deserve no finer digits.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence

from jaxtpu.plan.collectives import Network
from jaxtpu.plan.playback import Constants

# The first of those that fit alike is taken. No link is better than in the book on scaling, whose
# rates for v5e, v5p and v6e are nine tenths of the vendor's: jax-ml.github.io/scaling-book/tpus
GRID = {
    "product_efficiency": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75),
    "link_efficiency": (0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
}

Values = tuple[float, ...]  # in the order of GRID
Error = Callable[[Constants], float]  # predicted over measured speed, minus 1


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was fitted.

    Attributes:
      constants: the best of the grid for all measurements.
      errors: of each measurement, with those.
      left_out: of each measurement, with the constants that fit all the others best.
    """

    constants: Constants
    errors: tuple[float, ...]
    left_out: tuple[float, ...]


def make_constants(values: Values) -> Constants:
    """Constants of the time model from a point of the grid."""
    product, link = values
    return Constants(product, Network(link))


def values_of(constants: Constants) -> Values:
    """The inverse of `make_constants`."""
    return (constants.product_efficiency, constants.network.link_efficiency)


def fit(measurements: Sequence[Error]) -> Fit:
    """The constants with the least mean absolute error.

    Args:
      measurements: for each, its error as a function of the constants.
    """
    points = [make_constants(values) for values in itertools.product(*GRID.values())]
    errors = [tuple(error(constants) for error in measurements) for constants in points]
    best = _best(errors, range(len(measurements)))
    left_out = []
    for row in range(len(measurements)):
        others = [other for other in range(len(measurements)) if other != row]
        left_out.append(errors[_best(errors, others)][row])
    return Fit(points[best], errors[best], tuple(left_out))


def _best(errors: Sequence[Sequence[float]], rows: Sequence[int]) -> int:
    """Place of the point whose errors on `rows` are least in sum."""
    return min(range(len(errors)), key=lambda point: sum(abs(errors[point][row]) for row in rows))


def median_absolute(errors: Sequence[float]) -> float:
    """The median of the absolute errors."""
    return statistics.median(map(abs, errors))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 where both have the same order, -1 where one is the other reversed."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in order; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]
