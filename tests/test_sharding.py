"""The rule table: what is divided, what cannot be, and what stops the run."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtpu.config import ShardingConfig
from jaxtpu.errors import ConfigError
from jaxtpu.mesh import make_mesh
from jaxtpu.paths import flatten, matcher
from jaxtpu.sharding import make_rules
from tests.tiny import programs_on

SIZES = {"data": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}


@pytest.fixture(scope="module")
def rules():
    return make_rules(ShardingConfig(), make_mesh(SIZES))


def test_the_left_dimension_has_a_mesh_axis_first(rules):
    assert rules.spec(("batch", "sequence", "embed"), (8, 16, 32)) == P("fsdp", None, None)
    assert rules.spec(("embed", "mlp"), (32, 64)) == P("fsdp", "tensor")


def test_an_activation_that_does_not_divide_stays_whole(rules):
    assert rules.spec(("batch", "vocab"), (6, 257)) == P(None, None)


def test_a_parameter_moves_the_axis_to_the_longest_dimension_that_it_divides(rules):
    axes = ("layers", "embed", "kv_heads", "head_dim")
    spec, notes = rules.parameter_spec("key/kernel", axes, (2, 64, 3, 16))
    assert spec == P(None, ("fsdp", "tensor"), None, None)
    (note,) = notes
    assert (note.logical_axis, note.size, note.mesh_axis) == ("kv_heads", 3, "tensor")
    assert "kv_heads=3 is not divided by tensor=2" in str(note) and "embed" in str(note)


def test_a_parameter_that_nothing_divides_is_said_to_be_whole(rules):
    spec, notes = rules.parameter_spec("odd/kernel", ("embed", "mlp"), (7, 9))
    assert spec == P(None, None)
    assert [note.moved_to for note in notes] == [None, None]
    assert "holds all of it" in str(notes[0])


def test_every_spec_divides_its_array():
    for sizes in ({"tensor": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}):
        for leaf in jax.tree.leaves(programs_on(sizes).abstract_state):
            for size, part in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True):
                assert size % part == 0


def test_a_factored_moment_is_divided_as_the_rest_of_its_parameter():
    sections = {"model": {"embed": 256, "mlp": 512}, "optimizer": {"name": "adafactor"}}
    programs = programs_on({"fsdp": 4, "tensor": 2}, **sections)
    moments = {
        path: leaf.sharding.spec
        for path, leaf in flatten(programs.abstract_state.opt_state).items()
        if path.endswith("mlp/gate/kernel") and leaf.shape[-1] > 1
    }
    assert sorted(map(str, moments.values())) == [str(P(None, "fsdp")), str(P(None, "tensor"))]


@pytest.mark.parametrize(
    ("sizes", "sections", "field", "named"),
    [
        ({"fsdp": 8}, {"sharding": {"embed": ""}}, "mesh.fsdp", "sharding.embed=fsdp"),
        ({"fsdp": 4, "expert": 2}, {}, "mesh.expert", "mesh.expert=1"),
        ({"fsdp": 8}, {"model": {"embed": 30, "head_dim": 6}}, "mesh.fsdp", "24 or 32"),
    ],
    ids=["no rule", "no experts", "no divisor"],
)
def test_a_replicated_model_does_not_start(sizes, sections, field, named):
    with pytest.raises(ConfigError) as error:
        programs_on(sizes, **sections)
    assert error.value.field == field
    assert named in str(error.value)
    assert "embedding/table" in str(error.value) or "kernel" in str(error.value)


def test_replication_on_purpose_is_allowed():
    programs = programs_on({"fsdp": 8}, sharding={"embed": "", "max_replicated": 1.0})
    params = jax.tree.leaves(programs.abstract_state.params)
    assert all(leaf.sharding.is_fully_replicated for leaf in params)


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match="matches no parameter"):
        matcher("optimizer.no_decay", [".*/bias"], ["a/kernel", "a/scale"])
    decayed = matcher("optimizer.no_decay", [".*/scale"], ["a/kernel", "a/scale"])
    assert decayed("a/scale") and not decayed("a/scales")
