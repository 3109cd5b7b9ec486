"""The arithmetic estimate beside what the compiler said of the shipped configurations."""

import pytest

from jaxtpu.plan.goldens import read
from tests.benchmarks.estimate import estimated

CASES = [case for case in read() if case.figures]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_estimate_is_within_a_tenth_of_the_compiler(case):
    _, guess = estimated(case)
    for version, found in case.figures.items():
        assert guess.hbm_bytes == pytest.approx(found["hbm_bytes"], rel=0.1), version


def test_all_kinds_of_slices_are_recorded():
    assert {"v2-8", "v3-8", "v3-32", "2xv3-32"} <= {case.slice for case in CASES}
