import math

import pytest

from jaxtpu.config import leaves, load
from jaxtpu.config.validate import MESH_AXES
from jaxtpu.errors import ConfigError
from jaxtpu.hardware import parse_slice
from jaxtpu.plan.candidates import (
    KNOBS,
    Candidate,
    candidates,
    crossing,
    fixed_fields,
    no_candidate,
)
from jaxtpu.plan.command import without_mesh
from jaxtpu.plan.estimate import estimate
from tests.tiny import VOCABULARY, tiny_config


def found(config, name, fixed=frozenset()) -> list[Candidate]:
    slice_ = parse_slice(name)
    ready, _ = without_mesh(config, slice_, VOCABULARY)
    return list(candidates(ready, slice_, set(fixed)))


def test_seven_billion_parameters_on_v3_32_have_hundreds_of_candidates():
    every = found(load("configs/llama2_7b.py"), "v3-32")
    assert len(set(every)) == len(every) >= 200


@pytest.mark.parametrize("name", ["v3-8", "2xv3-32", "v4-8", "v5e-16", "v3-2048"])
def test_every_candidate_runs_on_the_slice(name):
    config = tiny_config(data={"batch_size": 2048}, model={"layers": 7})
    slice_ = parse_slice(name)
    every = found(config, name)
    assert every
    for candidate in every:
        sizes = candidate.sizes
        assert math.prod(candidate.mesh) == slice_.devices
        assert sizes["expert"] == 1
        assert 24 % sizes["context"] == 0
        rows = 2048 / (sizes["data"] * sizes["fsdp"])
        assert rows % candidate["train.microbatches"] == 0
        assert 6 % sizes["tensor"] == 0


@pytest.mark.parametrize(
    ("mesh", "slices", "axes"),
    [
        ((2, 32, 1, 1, 1), 2, {"data": 2}),
        ((1, 32, 1, 1, 2), 2, {"fsdp": 2}),
        ((2, 2, 1, 1, 16), 4, {"data": 2, "fsdp": 2}),
        ((1, 8, 1, 1, 1), 1, {}),
    ],
)
def test_which_axes_cross_slices(mesh, slices, axes):
    assert crossing(mesh, slices) == axes


def test_what_is_set_stays():
    config = tiny_config(model={"remat": "dots"}, mesh={"tensor": 2})
    fixed = fixed_fields(config, {"train.microbatches"}, set())
    assert fixed == {"model.remat", "mesh.tensor", "train.microbatches"}
    every = found(config, "v3-8", fixed)
    assert {c["model.remat"] for c in every} == {"dots"}
    assert {c.sizes["tensor"] for c in every} == {2}
    assert {c["train.microbatches"] for c in every} == {1}
    assert {c.sizes["fsdp"] for c in every} == {1, 2, 4}
    assert {c.sizes["context"] for c in every} == {1, 2, 4}


def test_open_fields_are_tried_although_they_are_set():
    config = tiny_config(model={"remat": "dots"}, mesh={"tensor": 2})
    fixed = fixed_fields(config, {"mesh.tensor"}, {"mesh", "model.remat"})
    assert fixed == set()
    with pytest.raises(ConfigError, match="--open='remat'.*model.remat"):
        fixed_fields(config, set(), {"remat"})


def test_applied_candidates_are_their_flags():
    config = load("configs/lm_1b.py")
    candidate = found(config, "v3-8")[7]
    overrides = [word[len("--config.") :].split("=") for word in candidate.flags().split()]
    assert dict(leaves(candidate.apply(config))) == dict(
        leaves(load("configs/lm_1b.py", [tuple(pair) for pair in overrides]))
    )
    assert [name for name, _ in overrides] == [*(f"mesh.{axis}" for axis in MESH_AXES), *KNOBS]


@pytest.mark.parametrize(
    ("optimizer", "choices"),
    [
        ({}, {"device", "host"}),
        ({"accumulate_steps": 2}, {"device"}),
        ({"name": "adafactor"}, {"device"}),
        ({"name": "adafactor", "rounding": "master"}, {"device", "host"}),
    ],
)
def test_state_goes_to_the_host_where_that_is_of_use(optimizer, choices):
    precision = {"params": "bfloat16"}
    every = found(tiny_config(optimizer=optimizer, precision=precision), "v3-8")
    assert {candidate["optimizer.placement"] for candidate in every} == choices


def test_state_on_the_host_is_slower_and_not_in_hbm():
    config, slice_ = load("configs/lm_1b.py"), parse_slice("v3-8")
    ready, units = without_mesh(config, slice_, VOCABULARY)
    knobs = (("model.remat", "full"), ("model.attention", "flash"), ("train.microbatches", 1))
    here, there = (
        estimate(
            ready,
            Candidate((1, 8, 1, 1, 1), (*knobs, ("optimizer.placement", placement))),
            slice_,
            units,
        )
        for placement in ("device", "host")
    )
    assert here.host_bytes == here.host_seconds == 0
    assert there.host_bytes == pytest.approx(1.27 * 2**30, rel=0.01)
    saved = here.hbm_bytes - there.hbm_bytes  # at the least all but the two layers on their way
    assert there.host_bytes * 22 / 24 < saved * 1.01 < there.host_bytes * 1.02
    assert there.seconds - here.seconds == pytest.approx(2 * there.host_bytes / 7.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "fixed", "name", "message"),
    [
        ({"mesh": {"data": 3}}, {"mesh.data"}, "v3-8", "mesh.data=3.*8 devices.*--open=mesh"),
        (
            {"data": {"batch_size": 7}},
            {"mesh.tensor", "mesh.context"},
            "v3-8",
            "batch_size=7: .* 8 parts.*Use 8",
        ),
        ({"mesh": {"tensor": 4}}, {"mesh.tensor"}, "v3-8", "tensor=4: does not divide .*heads=6"),
        (
            {"train": {"microbatches": 5}},
            {"train.microbatches"},
            "v3-8",
            "microbatches=5: .*--open",
        ),
    ],
)
def test_why_there_is_no_candidate(changes, fixed, name, message):
    slice_ = parse_slice(name)
    ready, _ = without_mesh(tiny_config(), slice_, VOCABULARY)
    ready.update(changes)
    assert not list(candidates(ready, slice_, fixed))
    with pytest.raises(ConfigError, match=message):
        raise no_candidate(ready, slice_, fixed)


def test_mesh_auto_leaves_open_what_only_the_file_sets():
    config = load("tests/configs/tiny.py", [("mesh", "auto"), ("mesh.tensor", "2")])
    assert config.mesh.auto
    assert (config.mesh.data, config.mesh.fsdp, config.mesh.tensor) == (1, -1, 2)
