"""Bad command lines and config files: one line that says what to write instead, and exit code 2."""

import json

import pytest

from jaxtpu import cli
from jaxtpu.config import finalize, load
from tests.config import TINY

CONFIG = f"--config={TINY}"

# Words of the command line, without the program; part of the message.
COMMAND_LINES = [
    ("no config", [], "--config='': is missing. For example: --config=configs/quickstart.py"),
    ("no config, fields", ["--config.seed=3"], "--config='': is missing. For example: --config="),
    ("empty config", ["--config="], "--config='': is not a config file (.py or .json). There are: "),
    ("missing file", ["--config=configs/quickstrat.py"],
     "--config='configs/quickstrat.py': there is no such file. Did you mean 'configs/quickstart.py'"),
    ("missing file, another folder", ["--config=tests/configs/tyni.py"],
     "'tests/configs/tyni.py': there is no such file. Did you mean 'tests/configs/tiny.py'"),
    ("file name alone", ["--config=quickstart"], "Did you mean 'configs/quickstart.py'"),
    ("another kind of file", ["--config=README.md"], "'README.md': is not a config file"),
    ("file without --config", ["configs/quickstart.py"],
     "run.py='configs/quickstart.py': is not a verb. Did you mean --config=configs/quickstart.py?"),
    ("unknown verb", ["trian", CONFIG], "run.py='trian': is not a verb. Did you mean 'train'?"),
    ("unknown topic", ["help", "confg"], "run.py help='confg': is not a topic. Use config."),
    ("unknown option", [CONFIG, "--wrkdir=x"], "--wrkdir='--wrkdir=x': is not an option here. "
     "Did you mean '--workdir'?"),
    ("misspelled --config", ["--confg=x.py"], "Did you mean '--config'?"),
    ("field without --config", [CONFIG, "model.heads=8"],
     "run.py='model.heads=8': is not an option here. Did you mean --config.model.heads=8?"),
    ("field with dashes only", [CONFIG, "--model.heads=8"], "Did you mean --config.model.heads=8?"),
    ("a word too many", [CONFIG, "--config.seed", "3", "4"],
     "run.py='4': is not an option. Write a field as --config.FIELD=VALUE."),
    ("field without a value", [CONFIG, "--config.seed"],
     "seed='': has no value. Write --config.seed=VALUE."),
    ("field followed by an option", [CONFIG, "--config.seed", "--config.name=x"],
     "seed='': has no value. Write --config.seed=VALUE."),
    ("unknown field, space", [CONFIG, "--config.sed", "3"], "sed=3: there is no such field. "
     "Did you mean 'seed'?"),
    ("unknown flag", [CONFIG, "--noconfig.model.tied"], "model.tied='': there is no such field."),
    ("negated number", [CONFIG, "--noconfig.seed"], "seed='': --noconfig is for fields that are"),
    ("negated flag with a value", [CONFIG, "--noconfig.model.tied_embeddings=1"],
     "model.tied_embeddings='1': --noconfig takes no value. Write --noconfig.model.tied_embeddings"),
    ("workdir without a value", [CONFIG, "--workdir"], "--workdir='': expected one argument."),
    ("empty workdir", [CONFIG, "--workdir="], "--workdir='': is empty. For example: --workdir="),
    ("workdir that is a file", [CONFIG, f"--workdir={TINY}"], "is not a folder that can be written"),
    ("workdir below a file", [CONFIG, f"--workdir={TINY}/run"], f"{TINY} is not a folder"),
    ("argument that is not taken", [f"{CONFIG}:big"],
     f"{TINY}:big': get_config() takes no argument. Write {CONFIG}."),
    ("generate from nothing", ["generate"], "--workdir='': is missing. For example: --workdir="),
    ("generate from no run", ["generate", "--workdir=configs"], "--workdir='configs': holds no run."),
    ("generate 1.5 tokens", ["generate", "--tokens=1.5"], "--tokens=1.5: must be a whole number. "
     "Use 1 or 2."),
    ("generate, not a number", ["generate", "--temperature=hot"],
     "--temperature='hot': must be of type float. Example: 0.1."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"), [row[1:] for row in COMMAND_LINES], ids=[row[0] for row in COMMAND_LINES]
)
def test_a_bad_command_line_is_refused(words, message, refused):
    assert message in refused(*words)


# The text of a config file, after its first line; part of the message, with FILE for its path.
FILES = [
    ("raises", "def get_config():\n    x = {}\n    return x['heads']\n",
     "--config='FILE': line 4: KeyError: 'heads'"),
    ("raises when imported", "1 / 0\n", "--config='FILE': line 2: ZeroDivisionError: division"),
    ("raises in many lines", "def get_config():\n    raise ValueError('a\\nb')\n",
     "--config='FILE': line 3: ValueError: a b"),
    ("syntax", "def get_config(:\n", "--config='FILE': line 2: SyntaxError: "),
    ("no get_config", "config = 3\n", "--config='FILE': defines no get_config()."),
    ("nothing returned", "def get_config():\n    Config()\n",
     "--config='FILE': get_config() returned NoneType. Return a jaxtpu.config.Config"),
    ("a number returned", "def get_config():\n    return 3\n", "get_config() returned int."),
    ("argument missing", "def get_config(size):\n    return Config()\n",
     "--config='FILE': get_config() takes an argument. Write --config=FILE:ARGUMENT."),
    ("unknown field", "def get_config():\n    config = Config()\n    config.model.headz = 4\n",
     "model.headz=4: there is no such field. Did you mean 'model.heads'? (FILE, line 4)"),
    ("unknown section", "def get_config():\n    config = Config()\n    config.modle.heads = 4\n",
     "modle='': there is no such field. Did you mean 'model'? (FILE, line 4)"),
    ("wrong section", "def get_config():\n    config = Config()\n    config.embed = 4\n",
     "embed=4: there is no such field. Did you mean 'model.embed' or 'sharding.embed'? (FILE, "),
    ("wrong type", "def get_config():\n    config = Config()\n    config.model.heads = '4'\n",
     "model.heads='4': must be of type int. Example: 8. (FILE, line 4)"),
    ("unknown key", "def get_config():\n    return {'model': {'headz': 4}}\n",
     "model.headz=4: there is no such field. Did you mean 'model.heads'?"),
    ("key that is no name", "def get_config():\n    return {3: 4}\n", "3=4: there is no such field."),
    ("placeholder", "from ml_collections import config_dict\ndef get_config():\n"
     "    return config_dict.create(seed=config_dict.required_placeholder(int))\n",
     "--config='FILE': RequiredValueError: "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_a_config_file_that_fails_is_told_with_its_line(text, message, refused, tmp_path):
    path = tmp_path / "config.py"
    path.write_text("from jaxtpu.config import Config\n" + text)
    assert message.replace("FILE", str(path)) in refused(f"--config={path}")


def test_the_line_is_told_for_a_relative_path_too(refused, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("\n\nraise ValueError('no')\n")
    monkeypatch.chdir(tmp_path)
    assert refused("--config=mine.py") == "--config='mine.py': line 3: ValueError: no"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("\xff", "cannot be read: 'utf-8' codec can't decode"),
        ("[3]", "holds a list, not a configuration."),
        ('{"model": {"headz": 4}}', "model.headz=4: there is no such field."),
        ('{"seed": Infinity}', "seed=inf: must be finite."),
    ],
    ids=["cut off", "not text", "a list", "unknown field", "infinite"],
)
def test_a_broken_config_json_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    for words in ([f"--config={path}"], ["generate", f"--workdir={tmp_path}"]):
        before = path.read_bytes()
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        assert message in said
        assert path.read_bytes() == before


def test_the_folder_of_another_model_is_left_alone(refused, tmp_path):
    other = load(TINY, [("model.mlp", "128")])
    finalize(other, num_devices=8, vocab_size=257)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(other.to_dict()))
    said = refused(CONFIG, f"--workdir={tmp_path}/run", "--config.compile_cache=")
    assert said.startswith(f"model.mlp=64: the run in {tmp_path}/run has 128.")
    assert "Choose another --workdir" in said


def test_help_is_given_for_every_verb(capsys):
    for words in (["--help"], ["-h"], ["train", "--help"], ["generate", "--help"], ["help"]):
        assert cli.main(words) == 0
        printed = capsys.readouterr()
        assert "python run.py --config=FILE" in printed.out and not printed.err
