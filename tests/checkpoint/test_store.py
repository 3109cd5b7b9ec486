"""Checkpoints: verified, damaged in every way, restored onto other meshes, dtypes and models."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtpu.checkpoint import Checkpoints, MismatchError, manifest
from jaxtpu.checkpoint.policy import Retention
from jaxtpu.config import CheckpointConfig
from jaxtpu.errors import UserError
from tests.tiny import programs_on


def state_of(step: int) -> dict:
    return {"params": {"w": jnp.arange(64.0) + step, "b": jnp.full((3,), float(step))}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of steps 2 and 4."""
    workdir = tmp_path_factory.mktemp("saved")
    checkpoints = Checkpoints(str(workdir), CheckpointConfig())
    for step in (2, 4):
        checkpoints.save(step, state_of(step), {"examples": step, "seed": 0}, None)
    checkpoints.wait()
    checkpoints.close()
    return workdir


def files_of(workdir):
    folder = workdir / "checkpoints" / "4"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def flip(path, chance):
    content = bytearray(path.read_bytes())
    if not content:
        path.write_bytes(b"x")
        return
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(content))


def truncate(path, chance):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: chance.randrange(size)] if size else b"x")


def delete(path, _chance):
    path.unlink()


def rename(path, _chance):
    path.rename(path.with_name(path.name + "x"))


def swap(path, chance):
    path.write_bytes(chance.randbytes(path.stat().st_size or 1))


@pytest.mark.parametrize("damage", [flip, truncate, delete], ids=lambda f: f.__name__)
def test_each_file_damaged_in_turn_is_noticed_and_the_checkpoint_before_is_taken(
    damage, saved, tmp_path
):
    files = files_of(saved)
    assert len(files) > 8
    for number, name in enumerate(files):
        workdir = tmp_path / str(number)
        shutil.copytree(saved, workdir)
        damage(workdir / "checkpoints" / "4" / name, random.Random(number))
        told = []
        checkpoints = Checkpoints(str(workdir), CheckpointConfig(), tell=told.append)
        assert checkpoints.newest_whole() == 2, name
        assert len(told) == 1 and "step 4 is damaged" in told[0], name
        state, position = checkpoints.restore(abstract(state_of(0)), 2)
        assert position == {"examples": 2, "seed": 0}
        np.testing.assert_array_equal(state["params"]["w"], state_of(2)["params"]["w"])
        assert checkpoints.newest_whole() == 2 and len(told) == 1  # set aside: told once
        checkpoints.close()


def abstract(tree, dtype=None):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding), tree
    )


def test_200_mutations_of_a_folder_never_restore_what_was_not_saved(saved, tmp_path):
    """Files of both checkpoints, one or two at a time: a whole one is restored, or it is told that
    there is none."""
    chance = random.Random(7)
    outcomes = {2: 0, 4: 0, None: 0}
    workdir = tmp_path / "run"
    for number in range(200):
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(saved, workdir)
        for _ in range(chance.choice((1, 1, 2, 3))):
            files = sorted(p for p in (workdir / "checkpoints").rglob("*") if p.is_file())
            chance.choice((flip, truncate, delete, rename, swap))(chance.choice(files), chance)
        told = []
        checkpoints = Checkpoints(str(workdir), CheckpointConfig(), tell=told.append)
        try:
            step = checkpoints.newest_whole()
        except UserError as error:
            assert "is whole" in str(error), number
            step = None
        outcomes[step] += 1
        assert step == 4 or told, number
        if step is not None and number % 10 == 0:  # reading is the slow part
            state, _ = checkpoints.restore(abstract(state_of(0)), step)
            np.testing.assert_array_equal(state["params"]["w"], state_of(step)["params"]["w"])
        checkpoints.close()
    assert min(outcomes.values()) > 0, outcomes


def test_a_save_that_was_killed_is_not_taken(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder / "4" / "manifest")
    shutil.copytree(folder / "2", folder / "6.orbax-checkpoint-tmp")
    checkpoints = Checkpoints(str(tmp_path / "run"), CheckpointConfig(), tell=lambda _: None)
    assert checkpoints.newest_whole() == 2
    assert not (folder / "6.orbax-checkpoint-tmp").exists()
    checkpoints.save(4, state_of(4), {"examples": 4, "seed": 0}, None)
    checkpoints.wait()
    assert checkpoints.newest_whole() == 4
    checkpoints.close()


def test_a_part_of_the_manifest_that_one_process_did_not_write_is_noticed(saved, tmp_path):
    shutil.copytree(saved / "checkpoints" / "4", tmp_path / "4")
    shutil.rmtree(tmp_path / "4" / "manifest")
    folder = Checkpoints(str(tmp_path), CheckpointConfig()).directory.parent / "4"
    manifest.write_part(folder, 0, 3)
    manifest.write_part(folder, 2, 3)
    assert not manifest.is_finished(folder) and manifest.faults(folder)
    manifest.write_part(folder, 1, 3)
    assert manifest.is_finished(folder) and manifest.faults(folder) == []


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(last=2), [9, 10]),
        (Retention(last=1, every=4), [4, 8, 10]),
        (Retention(last=1, best=2), [3, 5, 10]),
        (Retention(last=1, best=1, metric="accuracy"), [7, 10]),
    ],
)
def test_what_is_kept(retention, kept):
    ranked = {step: None for step in range(1, 11)} | {3: 1.0, 5: 0.5, 7: 2.0, 8: float("nan")}
    dropped = retention.dropped(ranked)
    assert [step for step in ranked if step not in dropped] == kept


def test_another_structure_is_told_by_name(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())
    checkpoints.save(1, state_of(1), {"examples": 1, "seed": 0}, None)
    checkpoints.wait()
    wanted = {"params": {"w": jnp.zeros((8, 8)), "c": jnp.zeros(3)}}
    with pytest.raises(MismatchError) as raised:
        checkpoints.restore(abstract(wanted), 1)
    checkpoints.close()
    message = str(raised.value)
    assert "missing from it: params/c (3,)" in message
    assert "unexpected in it: params/b (3,)" in message
    assert "of another shape: params/w (64,), here (8, 8)" in message


def test_parameters_restore_in_another_dtype_onto_fewer_devices(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig())
    before = programs_on({"fsdp": 4, "tensor": 2}).init()
    checkpoints.save(3, before, {"examples": 48, "seed": 0}, None)
    checkpoints.wait()
    target = programs_on({"fsdp": 2}, devices=2).abstract_state.params
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), target
    )
    after = checkpoints.restore_params(target, 3)
    run = checkpoints.read_run(3)
    checkpoints.close()
    for old, new in zip(*map(jax.tree.leaves, (before.params, after)), strict=True):
        assert new.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(old.astype(jnp.bfloat16)), np.asarray(new))
    assert {"jax", "flax", "optax", "python"} <= set(run["versions"])
    assert json.dumps(run["structure"])
