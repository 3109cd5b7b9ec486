"""The hardware table and slice names, against each other and against libtpu's topologies."""

import importlib.util
import math

import pytest

from jaxtpu.errors import ConfigError
from jaxtpu.hardware import ALIASES, GENERATIONS, generation_of, parse_slice

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.parametrize(
    "name, topology, devices, hosts",
    [
        ("v2-8", (2, 2), 8, 1),
        ("v2-512", (16, 16), 512, 64),
        ("v3-8", (2, 2), 8, 1),
        ("v3-32", (4, 4), 32, 4),
        ("v3-64", (4, 8), 64, 8),
        ("v3-128", (8, 8), 128, 16),
        ("v3-256", (8, 16), 256, 32),
        ("v3-512", (16, 16), 512, 64),
        ("v3-1024", (16, 32), 1024, 128),
        ("v3-2048", (32, 32), 2048, 256),
        ("v4-8", (2, 2, 1), 4, 1),
        ("v4-128", (4, 4, 4), 64, 16),
        ("v4-1536", (8, 8, 12), 768, 192),
        ("v5e-1", (1, 1), 1, 1),
        ("v5e-4", (2, 2), 4, 1),
        ("v5e-8", (2, 4), 8, 1),
        ("v5litepod-16", (4, 4), 16, 4),
        ("v5e-256", (16, 16), 256, 64),
        ("v5p-8", (2, 2, 1), 4, 1),
        ("v5p-32", (2, 2, 4), 16, 4),
        ("v5p-64", (2, 4, 4), 32, 8),
        ("v5p-128", (4, 4, 4), 64, 16),
        ("v5p-1792", (4, 8, 28), 896, 224),
        ("v5p-7808", (4, 4, 244), 3904, 976),
        ("v5p-12288", (16, 16, 24), 6144, 1536),
        ("v6e-8", (2, 4), 8, 1),
        ("v6e-32", (4, 8), 32, 8),
        ("tpu7x-8", (2, 2, 1), 8, 1),
        ("v7x-8", (2, 2, 1), 8, 1),
        ("7x-128", (4, 4, 4), 128, 16),
        ("ironwood-18432", (16, 24, 24), 18432, 2304),
        ("2xv3-32", (4, 4), 64, 8),
        ("2x7x-8", (2, 2, 1), 16, 2),
        ("v3:4x4", (4, 4), 32, 4),
        ("2xv5p:2x2x1", (2, 2, 1), 8, 2),
        (" V3-32 ", (4, 4), 32, 4),
    ],
)
def test_a_name_gives_the_vendors_shape(name, topology, devices, hosts):
    slice_ = parse_slice(name)
    assert (slice_.topology, slice_.devices, slice_.hosts) == (topology, devices, hosts)


def test_counts_cover_all_slices():
    slice_ = parse_slice("4xv5p-32")
    assert (slice_.slices, slice_.chips, slice_.devices_per_slice, slice_.devices) == (
        4,
        64,
        16,
        64,
    )


def test_arguments_for_the_compiler():
    assert parse_slice("v3-32").topology_name == "v3:4x4"
    assert parse_slice("v3-32").topology_kwargs == {}
    assert parse_slice("v7x-8").topology_name == "tpu7x:2x2x1"
    assert parse_slice("2xv4-8").topology_kwargs == {
        "chip_config_name": "megacore",
        "num_slices": 2,
    }
    assert parse_slice("v6e-8").topology_kwargs == {"chips_per_host_bounds": (2, 4, 1)}


@pytest.mark.parametrize(
    "name, advice",
    [
        ("v3-16", "Use v3-8 or v3-32."),
        ("v3-4096", "Use v3-2048."),
        ("v3-4", "Use v3-8."),
        ("v5litepod-12", "Use v5litepod-8 or v5litepod-16."),
        ("v5p-12", "Use v5p-8 or v5p-16."),
        ("v5p-8576", "Use v5p-8448 or v5p-8704."),  # its shape would be 4x4x268
        ("v3:4x4x4", "a v3 shape has 2 axes."),
        ("v3:1x4", "do not tile"),
        ("v3:4x0", "do not tile"),
        ("v5e:2x32", "larger than any v5e slice."),
        ("v3_8", "Did you mean 'v3-8'?"),
        ("v3", "v3-32"),
        ("0xv3-32", "v3-8"),
        ("gpu", "v3-8"),
        ("", "v3-8"),
    ],
)
def test_a_wrong_name_is_refused_with_one_that_works(name, advice):
    with pytest.raises(ConfigError) as error:
        parse_slice(name, field="plan.slice")
    assert advice in str(error.value)
    assert str(error.value).startswith(f"plan.slice={name!r}: ")


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS)
def test_the_table_agrees_with_itself(generation):
    assert generation.sizes == tuple(sorted(generation.sizes))
    assert 0 < generation.default_budget_gib <= min(generation.hbm_limit_gib, generation.hbm_gib)
    assert generation.cores_per_chip % generation.devices_per_chip == 0
    assert generation.host_memory_gib is None or generation.host_memory_gib > 100
    for cores, shape in generation.offered.items():
        slice_ = parse_slice(f"{generation.name}-{cores}")
        written = parse_slice(f"{generation.name}:{'x'.join(map(str, shape))}")
        assert slice_.topology == written.topology == shape
        assert slice_.hosts == written.hosts >= 1
        assert math.prod(shape) * generation.cores_per_chip == cores


def test_the_budget_of_a_v3_core_is_8_gib():
    assert GENERATIONS["v3"].default_budget_gib == 8.0


def test_aliases_name_generations():
    assert set(ALIASES.values()) <= set(GENERATIONS)


@pytest.mark.parametrize(
    "device_kind, name",
    [
        ("TPU v2", "v2"),
        ("TPU v3", "v3"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
    ],
)
def test_generation_of_a_device(device_kind, name):
    assert generation_of(device_kind) is GENERATIONS[name]


@pytest.mark.parametrize("device_kind", ["cpu", "", "TPU v9", "NVIDIA H100"])
def test_other_devices_have_no_generation(device_kind):
    assert generation_of(device_kind) is None


# fmt: off
COMPILED = [
    "v2-8", "v2-512", "v3-8", "v3-32", "v3-256", "v3-2048", "v4-8", "v4-128", "v5e-1", "v5e-4",
    "v5e-8", "v5e-16", "v5e-256", "v5e:4x2", "v5p-8", "v5p-128", "v5p-7808", "v6e-1", "v6e-8",
    "v6e-256", "v7x-2", "tpu7x-8", "tpu7x-128", "2xv3-32", "2xv4-8", "2xv5e-16", "2xv6e-8",
]
# fmt: on


@pytest.mark.tpu_compile
@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed")
@pytest.mark.parametrize("name", COMPILED)
def test_libtpu_has_the_same_devices(name, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    # Without the first, libtpu waits for a metadata server; without the second, two tests at once
    # die of its lock file.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    slice_ = parse_slice(name)
    devices = topologies.get_topology_desc(
        slice_.topology_name, platform="tpu", **slice_.topology_kwargs
    ).devices
    assert len(devices) == slice_.devices
    assert len({device.process_index for device in devices}) == slice_.hosts
    assert {generation_of(device.device_kind) for device in devices} == {slice_.generation}
    assert len({getattr(device, "slice_index", 0) for device in devices}) == slice_.slices
