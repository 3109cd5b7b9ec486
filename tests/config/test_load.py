"""From a command line to a `Config`: the same as `ml_collections.config_flags` makes of it."""

import json
import pathlib
import warnings

import pytest
from absl import flags
from ml_collections import config_dict, config_flags

from jaxtpu.config import Config, leaves, load, split_arguments
from jaxtpu.errors import ConfigError
from tests.config import ROOT, TINY

# The fields of ours that a small ConfigDict holds. With an argument, that is the run's name.
CONFIG_DICT = """\
from ml_collections import config_dict

def get_config(argument="none"):
    return config_dict.create(
        name=argument,
        seed=1,
        model=dict(embed=64, tied_embeddings=False),
        optimizer=dict(name="adamw", learning_rate=0.1, no_decay=(".*/scale", "embedding/.*")),
    )
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG_DICT)
    return path


def theirs(words: list[str]) -> config_dict.ConfigDict:
    argv = ["run.py", *words]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    with warnings.catch_warnings():  # it loads the file in a way that Python gives up
        warnings.simplefilter("ignore", DeprecationWarning)
        values(argv)
    return holder.value


def ours(words: list[str]) -> Config:
    spec, overrides, rest = split_arguments(words)
    assert rest == []
    return load(spec, overrides)


@pytest.mark.parametrize(
    "words",
    [
        ["--config=FILE"],
        ["--config", "FILE"],
        ["-config=FILE"],
        ["--config=FILE:big"],
        ["--config=FILE:a:b=c.py"],
        ["--config=FILE:one", "--config=FILE:two"],
        ["--config=FILE", "--config.seed=2"],
        ["--config=FILE", "--config.seed", "2"],
        ["--config=FILE", "-config.seed=2"],
        ["--config=FILE", "--config.seed=0x10"],
        ["--config=FILE", "--config.seed=2", "--config.seed=3"],
        ["--config=FILE", "--config.seed=2", "--config.model.embed=8", "--config.seed", "4"],
        ["--config=FILE", "--config.model.embed=128", "--config.optimizer.name=lion"],
        ["--config=FILE", "--config.optimizer.learning_rate=1e-4"],
        ["--config=FILE", "--config.optimizer.learning_rate=2"],
        ["--config=FILE", "--config.optimizer.learning_rate", "0.5"],
        ["--config=FILE", "--config.name=7"],
        ["--config=FILE", "--config.name=a=b"],
        ["--config=FILE", "--config.name=two words"],
        ["--config=FILE", "--config.name='quoted'"],
        ["--config=FILE", "--config.name=None"],
        ["--config=FILE", "--config.model.tied_embeddings"],
        ["--config=FILE", "--config.model.tied_embeddings=true"],
        ["--config=FILE", "--config.model.tied_embeddings=True"],
        ["--config=FILE", "--config.model.tied_embeddings=1"],
        ["--config=FILE", "--config.model.tied_embeddings=t"],
        ["--config=FILE", "--config.model.tied_embeddings=False"],
        ["--config=FILE", "--config.model.tied_embeddings=0"],
        ["--config=FILE", "--noconfig.model.tied_embeddings"],
        ["--config=FILE", "--config.model.tied_embeddings", "--noconfig.model.tied_embeddings"],
        ["--config=FILE", "--noconfig.model.tied_embeddings", "--config.model.tied_embeddings"],
        ["--config=FILE", "--config.optimizer.no_decay=.*/kernel"],
        ["--config=FILE", "--config.optimizer.no_decay=('a', 'b/.*')"],
        ["--config=FILE", "--config.optimizer.no_decay=['a', 'b/.*']"],
        ["--config=FILE", "--config.optimizer.no_decay", "('a',)"],
        ["--config=FILE", "--config.optimizer.no_decay=()"],
        ["--config=FILE", "--config.optimizer.no_decay=a", "--config.optimizer.no_decay=b"],
        ["--config=FILE", "--config.optimizer.no_decay=('a','b')", "--config.optimizer.no_decay=c"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_command_line_means_what_it_means_to_config_flags(words, file):
    words = [word.replace("FILE", str(file)) for word in words]
    expected = theirs(words)
    config = ours(words)
    for name, value in config_leaves(expected):
        section, _, field = name.rpartition(".")
        actual = getattr(getattr(config, section) if section else config, field)
        assert (type(actual), actual) == (type(value), value), name


def config_leaves(values: config_dict.ConfigDict) -> list[tuple[str, object]]:
    found = []
    for name, value in values.items():
        if isinstance(value, config_dict.ConfigDict):
            found += [(f"{name}.{inner}", item) for inner, item in value.items()]
        else:
            found.append((name, value))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--config=FILE", "--config.sed=2"],
        ["--config=FILE", "--config.model.layesr=2"],
        ["--config=FILE", "--config.seed=two"],
        ["--config=FILE", "--config.seed=1.5"],
        ["--config=FILE", "--config.seed"],
        ["--config=FILE", "--config.model.tied_embeddings=maybe"],
        ["--config=FILE", "--noconfig.model.tied_embeddings=1"],
        ["--config=FILE", "--noconfig.seed"],
        ["--config=FILE", "--config.optimizer.learning_rate=fast"],
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_what_config_flags_refuses_is_refused(words, file):
    words = [word.replace("FILE", str(file)) for word in words]
    with pytest.raises((flags.Error, ValueError, TypeError, AttributeError)):
        theirs(words)
    with pytest.raises(ConfigError):
        ours(words)


def test_the_parts_of_a_command_line():
    words = ["--config.seed=1", "--workdir=x", "--config", "f.py:a", "word", "--config.name", "b"]
    spec, overrides, rest = split_arguments(words)
    assert spec == "f.py:a"
    assert overrides == [("seed", "1"), ("name", "b")]
    assert rest == ["--workdir=x", "word"]
    assert split_arguments([]) == (None, [], [])


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("model.embed", "128", 128),
        ("model.embed", "1e3", 1000),
        ("model.embed", "64.0", 64),
        ("model.rope_theta", "500000", 500000.0),
        ("model.rope_theta", "5e5", 500000.0),
        ("model.tied_embeddings", "TRUE", True),
        ("model.remat", "none", "none"),
        ("name", "true", "true"),
        ("name", "1e3", "1e3"),
        ("data.validation_split", "", ""),
        ("loss", "sparse_categorical_crossentropy", "cross_entropy"),
        ("metrics", "accuracy", ("accuracy",)),
        ("metrics", "", ()),
        ("optimizer.no_decay", "a, b/.*", ("a", "b/.*")),
        ("optimizer.no_decay", "['a{1,2}']", ("a{1,2}",)),
        ("optimizer.no_decay", r"'.*\d'", (r".*\d",)),
        ("train.steps", "300", 300),
        ("train.steps", "1e6", 1_000_000),
        ("train.steps", "10B tokens", "10B tokens"),
        ("train.steps", "None", None),
        ("train.log_every", "5%", "5%"),
        ("train.epochs", "None", None),
        ("train.epochs", "2", 2),
        ("mesh.fsdp", "-1", -1),
        ("model", "{'embed': 8}", 8),
    ],
)
def test_a_value_becomes_the_type_of_its_field(field, text, value, recwarn):
    config = load(TINY, [(field, text)])
    found = dict(leaves(config))["model.embed" if field == "model" else field]
    assert (type(found), found) == (type(value), value)
    assert not recwarn.list


def test_an_assignment_is_checked_like_an_override():
    config = Config()
    config.optimizer.learning_rate = 1
    config.optimizer.no_decay = ["a"]
    config.train.update({"steps": 1e3, "epochs": None})
    config.update({"mesh.fsdp": 4, "mesh": {"data": 2}})
    assert isinstance(config.optimizer.learning_rate, float)
    assert config.optimizer.no_decay == ("a",)
    assert (config.train.steps, config.mesh.fsdp, config.mesh.data) == (1000, 4, 2)
    for name in ("embed", "modle", "to_dct"):
        with pytest.raises(ConfigError):
            getattr(config, name)
    with pytest.raises(ConfigError, match="this is a section"):
        config.model = {"embed": 8}
    assert not hasattr(config, "_repr_html_")  # what notebooks and debuggers ask for


def test_two_configurations_share_nothing():
    one, other = Config(), Config()
    one.model.embed = 8
    assert other.model.embed != 8
    assert one != other


@pytest.mark.parametrize(
    ("suffix", "argument", "name"),
    [("", None, "small"), (":", "", "small"), (":big", "big", "small-big")],
)
def test_the_name_and_the_folder_of_a_run(suffix, argument, name, tmp_path):
    path = tmp_path / "small.py"
    path.write_text(
        "from jaxtpu.config import Config\n\ndef get_config(argument=None):\n"
        "    config = Config()\n    config.data.text_field = repr(argument)\n    return config\n"
    )
    config = load(f"{path}{suffix}")
    assert config.data.text_field == repr(argument)
    assert (config.name, config.workdir) == (name, f"runs/{name}")
    named = load(f"{path}{suffix}", [("name", "mine")])
    assert (named.name, named.workdir) == ("mine", "runs/mine")
    assert load(f"{path}{suffix}", [("workdir", "there")]).workdir == "there"


def test_get_config_may_return_a_dict(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def get_config():\n    return {'seed': 5, 'model': {'embed': 8}}\n")
    config = load(str(path))
    assert (config.seed, config.model.embed, config.model.layers) == (5, 8, Config().model.layers)


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "configs").glob("*.py")), pathlib.Path(TINY)], ids=lambda p: p.stem
)
def test_a_config_survives_json(path, tmp_path):
    config = load(str(path))
    saved = tmp_path / "config.json"
    saved.write_text(json.dumps(config.to_dict()))
    again = load(str(saved))
    assert again == config
    assert again.to_dict() == config.to_dict()
