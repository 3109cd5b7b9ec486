"""List prices of TPUs, each with its date and source. They change: a plan takes `--price` too."""

import dataclasses

from jaxtpu.errors import ConfigError, nearest

# The vendor's price list as SkyPilot copied it: catalogs/v8/gcp/vms.csv at commit 006059e. Its
# format is in use since the end of 2025; the day of the commit is not known here. Regions beside
# the prices are the cheapest of the United States that have larger slices, too.
_CATALOG, _CATALOG_DATE = "https://github.com/skypilot-org/skypilot-catalog", "2025-12"
# Commitments are on the vendor's page only (https://cloud.google.com/tpu/pricing). Epoch AI noted
# it down, from archived copies, until 2023: data/Hardware prices.csv. Later ones were not found.
_EPOCH = "https://github.com/epoch-research/training-cost-trends"

KINDS = ("on_demand", "spot", "committed_1y", "committed_3y")


@dataclasses.dataclass(frozen=True)
class Price:
    """A price of one chip.

    Attributes:
      usd: dollars an hour; the virtual machine of the chip is included.
      date: when it was seen: year and month, or the day.
      source: address.
    """

    usd: float
    date: str = _CATALOG_DATE
    source: str = _CATALOG


# By generation of `hardware.GENERATIONS`; what is absent is not known.
PRICES: dict[str, dict[str, Price]] = {
    "v2": {
        "on_demand": Price(1.50),  # v2-32 and up, us-central1; a lone v2-8 is 1.125
        "spot": Price(0.3825),
    },
    "v3": {
        "on_demand": Price(2.00),  # us-central1 (v3-8), us-east1 (larger)
        "spot": Price(0.60),  # us-east1, v3-32 and up; a lone v3-8 in us-central1 is 0.51
        "committed_1y": Price(1.26, "2021-11-17", _EPOCH),
        "committed_3y": Price(0.90, "2021-11-17", _EPOCH),
    },
    "v4": {
        "on_demand": Price(3.22),  # us-central2
        "spot": Price(0.9215),
        "committed_1y": Price(2.03, "2023-06-01", _EPOCH),
        "committed_3y": Price(1.45, "2023-06-01", _EPOCH),
    },
    "v5e": {
        "on_demand": Price(1.20),  # us-central1
        "spot": Price(0.24493),
    },
    "v5p": {
        "on_demand": Price(4.20),  # us-central1
        "spot": Price(0.83570),
    },
    "v6e": {
        "on_demand": Price(2.70),  # us-central1
        "spot": Price(0.54421),
    },
    "v7x": {},  # not in the catalogue
}


def price_per_chip_hour(generation: str, kind: str = "on_demand") -> Price | None:
    """The list price; None where it is not known.

    Args:
      generation: name of one of `hardware.GENERATIONS`.
      kind: one of KINDS. Spot capacity may be taken away at any time; a commitment is for one or
        three years.

    Raises:
      ConfigError: `kind` is not one of KINDS.
    """
    if kind not in KINDS:
        raise ConfigError("price", kind, "is not a kind of price.", nearest(kind, KINDS))
    return PRICES[generation].get(kind)
