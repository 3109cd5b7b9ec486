import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxtpu.data import sources
from jaxtpu.data.quiet_tensorflow import import_tensorflow, import_tfds
from jaxtpu.errors import ConfigError, UserError

tfds = import_tfds()


class TinyPoems(tfds.core.GeneratorBasedBuilder):
    """A data set with a text feature that is not called `text`."""

    VERSION = tfds.core.Version("2.0.0")

    def _info(self):
        features = {"poem": tfds.features.Text(), "lines": tfds.features.Scalar(np.int32)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(20), "test": self._generate_examples(2)}

    def _generate_examples(self, count):
        for number in range(count):
            yield number, {"poem": f"roses {number}", "lines": 1}


class BrokenPoems(TinyPoems):
    """A data set that cannot be prepared."""

    def _split_generators(self, dl_manager):
        raise ConnectionError("no route to host")


def read(source="tfds:tiny_poems", split="train", directory="", **arguments):
    opened = sources.open_source(source, str(directory), (arguments.get("text_field", "poem"),))
    return list(opened.documents(split, arguments.get("split_field", "data.train_split")))


def test_any_registered_data_set_is_read_and_nothing_is_said(tmp_path, capfd):
    poems = read(directory=tmp_path)
    assert sorted(poems) == sorted(f"roses {n}".encode() for n in range(20))
    assert read(directory=tmp_path) == poems
    assert read(split="train[:5]", directory=tmp_path) == poems[:5]
    assert (tmp_path / "tfds/tiny_poems/2.0.0").is_dir()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "python_corpse"}, r"data\.source=.*Did you mean 'python_corpus'\?"),
        ({"source": "xyz"}, r"data\.source='xyz'.*Use python_corpus,.* or tfds:NAME"),
        ({"source": "python_corpus:x"}, r"data\.source='python_corpus:x'.*Use python_corpus\."),
        ({"source": "tfds:tiny_poem"}, r"data\.source=.*Did you mean 'tfds:tiny_poems'\?"),
        ({"source": "tfds:"}, r"data\.source='tfds:'"),
        ({"source": "tfds:tiny_poems:9.9.9"}, r"data\.source=.*only: 2\.0\.0"),
        ({"source": "tfds:huggingface:x"}, r"data\.source=.*namespace"),  # and asks no network
        ({"text_field": "pom"}, r"data\.text_field='pom'.*Did you mean 'poem'\?"),
        ({"text_field": "lines"}, r"data\.text_field='lines'"),
        ({"split": "tests"}, r"data\.train_split='tests'.*Did you mean 'test'\?"),
        ({"split": "x", "split_field": "data.validation_split"}, r"data\.validation_split='x'"),
        ({"split": "train[:0]"}, r"data\.train_split='train\[:0\]': is empty.*train, test"),
    ],
)
def test_what_cannot_be_read_is_told_with_what_can(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read(directory=tmp_path, **arguments)


def test_a_failed_preparation_is_told_with_its_cause(tmp_path):
    with pytest.raises(UserError, match=r"broken_poems.*no route to host") as caught:
        read("tfds:broken_poems", directory=tmp_path)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert not [path for path in pathlib.Path(tmp_path).rglob("*") if path.suffix == ".json"]


def test_data_prepared_by_another_process_meanwhile_is_read(tmp_path):
    source = sources.open_source("tfds:tiny_poems", str(tmp_path), ("poem",))
    poems = read(directory=tmp_path)
    assert list(source.documents("train", "data.train_split")) == poems


def test_losing_a_race_to_prepare_is_no_failure(tmp_path, monkeypatch):
    source = sources.open_source("tfds:tiny_poems", str(tmp_path), ("poem",))

    def lose():
        read(directory=tmp_path)
        raise OSError("Directory not empty")

    monkeypatch.setattr(source._builder, "download_and_prepare", lose)
    assert len(list(source.documents("train", "data.train_split"))) == 20


def test_tensorflow_sees_no_accelerator():
    tf = import_tensorflow()
    assert not tf.config.get_visible_devices("GPU") + tf.config.get_visible_devices("TPU")


def test_keras_is_not_imported_until_somebody_asks_for_it():
    """Its import takes as long as TensorFlow's own: a start of every run would pay for it."""
    script = (
        "import sys\n"
        "from jaxtpu.data.quiet_tensorflow import import_tfds\n"
        "import_tfds()\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'keras'])\n"
        "from tensorflow.keras import layers\n"
        "print(layers.Dense(3).units)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[]", "3"]
