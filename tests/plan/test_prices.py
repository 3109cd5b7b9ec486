"""List prices: every one has a date and a source, and they are in the order that they must be."""

import itertools

import pytest

from jaxtpu.errors import ConfigError
from jaxtpu.hardware import GENERATIONS
from jaxtpu.plan.prices import KINDS, PRICES, price_per_chip_hour


def test_every_generation_has_an_entry_and_every_price_a_date_and_a_source():
    assert set(PRICES) == set(GENERATIONS)
    for kinds in PRICES.values():
        assert set(kinds) <= set(KINDS)
        for price in kinds.values():
            assert 0 < price.usd < 20
            assert price.date.startswith("20") and price.source.startswith("https://")


@pytest.mark.parametrize("generation", PRICES)
def test_commitment_and_risk_are_cheaper(generation):
    order = ("on_demand", "committed_1y", "committed_3y", "spot")
    known = [p.usd for p in (price_per_chip_hour(generation, kind) for kind in order) if p]
    assert all(dear > cheap for dear, cheap in itertools.pairwise(known))


def test_look_up():
    assert price_per_chip_hour("v3").usd == 2.00
    assert price_per_chip_hour("v3", "spot").usd == 0.60
    assert price_per_chip_hour("v7x") is None
    with pytest.raises(ConfigError, match="on_demand"):
        price_per_chip_hour("v3", "ondemand")
