"""Fits the constants of the time model to measurements, and says how far the fit can be trusted.

A few constants, with one value for all measurements, over a coarse grid of values that are
physically possible: the figures come from other people's programs, and deserve no finer digits.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence

from jaxtpu.plan.collectives import Network
from jaxtpu.plan.playback import CONSTANTS, Constants

# Best first where two fit alike: nearer to what the hardware's pages promise.
GRID = {
    "product_efficiency": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7),
    "link_efficiency": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3),
    "collective_seconds": (1e-6, 2e-6, 5e-6, 10e-6, 20e-6, 50e-6),
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
    product, link, collective = values
    return Constants(product, Network(link, collective))


def values_of(constants: Constants) -> Values:
    """The inverse of `make_constants`."""
    network = constants.network
    return (constants.product_efficiency, network.link_efficiency, network.collective_seconds)


def fit(measurements: Sequence[Error], start: Constants = CONSTANTS) -> Fit:
    """The constants with the least mean absolute error, by descent along one constant at a time.

    Args:
      measurements: for each, its error as a function of the constants; called often.
    """

    @functools.cache
    def errors(values: Values) -> tuple[float, ...]:
        constants = make_constants(values)
        return tuple(error(constants) for error in measurements)

    begin = tuple(
        min(choices, key=lambda choice: abs(choice - value))
        for choices, value in zip(GRID.values(), values_of(start), strict=True)
    )
    everything = range(len(measurements))
    best = _descend(errors, begin, everything)
    left_out = []
    for row in everything:
        others = [other for other in everything if other != row]
        left_out.append(errors(_descend(errors, best, others))[row])
    return Fit(make_constants(best), errors(best), tuple(left_out))


def _descend(
    errors: Callable[[Values], tuple[float, ...]], begin: Values, rows: Sequence[int]
) -> Values:
    def cost(values: Values) -> float:
        found = errors(values)
        return sum(abs(found[row]) for row in rows)

    best, before = begin, None
    while best != before:
        before = best
        for position, choices in enumerate(GRID.values()):
            tried = (best[:position] + (choice,) + best[position + 1 :] for choice in choices)
            best = min(tried, key=cost)
    return best


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
