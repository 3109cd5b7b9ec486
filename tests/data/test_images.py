"""Images: every kind of source, and records that cannot be used."""

import pathlib

import numpy as np
import pytest
from PIL import Image

from jaxtpu.config import Config
from jaxtpu.data.image_loader import training_batches
from jaxtpu.data.images import open_images
from jaxtpu.data.quiet_tensorflow import import_tfds
from jaxtpu.errors import ConfigError, UserError

tfds = import_tfds()
SIZE = 8


def picture(number: int, shape=(9, 12, 3)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


class TinyPictures(tfds.core.GeneratorBasedBuilder):
    """Pictures of three classes; in the split `test`, one has no label."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "picture": tfds.features.Image(shape=(None, None, 3)),
            "kind": tfds.features.ClassLabel(names=["a", "b", "c"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(20, 0), "test": self._generate_examples(3, -1)}

    def _generate_examples(self, count, last):
        for n in range(count):
            yield n, {"picture": picture(n), "kind": last if n == count - 1 else n % 3}


def config_of(source: str, directory, **data) -> Config:
    config = Config()
    config.data.update({"source": source, "directory": str(directory), "batch_size": 4, **data})
    config.model.vision.update({"image_size": SIZE, "classes": 3})
    config.images.update({"image_field": "picture", "label_field": "kind"})
    return config


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Nine pictures of three classes in the split train, one of one class in validation."""
    for split, count in (("train", 9), ("validation", 1)):
        for n in range(count):
            path = tmp_path / "pictures" / split / "abc"[n % 3] / f"{n}.{('png', 'jpg')[n % 2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture(n)).save(path)
    return tmp_path / "pictures"


def test_the_digits_are_split_and_no_two_splits_share_one(tmp_path):
    config = config_of("digits", tmp_path)
    train, validation = (open_images(config, f"{s}_split") for s in ("train", "validation"))
    assert (len(train), len(validation), train.classes) == (1437, 360, tuple("0123456789"))
    bytes_of = lambda images: {images.read(n) for n in range(len(images))}  # noqa: E731
    assert len(bytes_of(train) | bytes_of(validation)) == 1797
    assert np.bincount(validation.labels).min() > 20


def test_classes_are_folders_and_have_the_same_number_in_every_split(folder, tmp_path):
    config = config_of(f"folder:{folder}", tmp_path)
    train, validation = (open_images(config, f"{s}_split") for s in ("train", "validation"))
    assert train.classes == validation.classes == ("a", "b", "c")
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert validation.labels.tolist() == [0]
    assert train.read(0) == (folder / "train/a/0.png").read_bytes()
    assert train.counts.read == train.counts.used == 9


def test_any_tfds_images_are_read_as_they_are_stored(tmp_path):
    images = open_images(config_of("tfds:tiny_pictures", tmp_path), "train_split")
    builder = tfds.builder("tiny_pictures", data_dir=str(tmp_path / "tfds"))
    stored = [
        (example["picture"], example["kind"])
        for example in builder.as_dataset(split="train").as_numpy_iterator()
    ]
    assert images.labels.tolist() == [label for _, label in stored]
    for number, (pixels, _) in enumerate(stored):
        path = tmp_path / "one.png"
        path.write_bytes(images.read(number))
        np.testing.assert_array_equal(np.asarray(Image.open(path)), pixels)
    part = open_images(
        config_of("tfds:tiny_pictures", tmp_path, train_split="train[5:9]"), "train_split"
    )
    assert [part.read(n) for n in range(4)] == [images.read(n) for n in range(5, 9)]
    prepared = tmp_path / "tfds/tiny_pictures/1.0.0"
    again = open_images(config_of(f"tfds:{prepared}", tmp_path), "train_split")
    assert again.labels.tolist() == images.labels.tolist()


def test_images_are_looked_at_once(folder, tmp_path, monkeypatch):
    config = config_of(f"folder:{folder}", tmp_path)
    first = open_images(config, "train_split")
    monkeypatch.setattr("jaxtpu.data.images._problem", None)
    again = open_images(config, "train_split")
    assert (again.labels.tolist(), again.counts) == (first.labels.tolist(), first.counts)
    monkeypatch.undo()
    (folder / "train/a/0.png").write_bytes(b"changed")
    with pytest.raises(UserError, match=r"a/0\.png: is no image"):
        open_images(config, "train_split")


def test_a_file_that_is_no_image_is_named_or_left_out_and_counted(folder, tmp_path):
    bad = folder / "train/b/1.jpg"
    bad.write_bytes(bad.read_bytes()[:40])
    with pytest.raises(UserError, match=r"b/1\.jpg: is no image: .*set data\.max_bad=0\.01"):
        open_images(config_of(f"folder:{folder}", tmp_path), "train_split")
    with pytest.raises(UserError, match=r"Of 9 records, 1 cannot .*use data\.max_bad=0\.112"):
        open_images(config_of(f"folder:{folder}", tmp_path, max_bad=0.1), "train_split")
    images = open_images(config_of(f"folder:{folder}", tmp_path, max_bad=0.112), "train_split")
    counts = images.counts
    assert (counts.read, counts.used, counts.bad, len(images)) == (9, 8, 1, 8)
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert images.read(3) == (folder / "train/b/4.png").read_bytes()


def test_a_label_out_of_range_is_named_or_left_out_and_counted(tmp_path):
    arguments = {"train_split": "test"}
    with pytest.raises(UserError, match=r"split test, record \d: label -1 is not one of 0 to 2"):
        open_images(config_of("tfds:tiny_pictures", tmp_path, **arguments), "train_split")
    images = open_images(
        config_of("tfds:tiny_pictures", tmp_path, max_bad=0.5, **arguments), "train_split"
    )
    assert (images.counts.read, images.counts.used, images.counts.bad) == (3, 2, 1)


def test_an_image_that_is_gone_ends_the_run_with_its_name(folder, tmp_path):
    config = config_of(f"folder:{folder}", tmp_path)
    images = open_images(config, "train_split")
    (folder / "train/c/2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"c/2\.png"):
        for _, _ in zip(training_batches(images, config, 0, np.arange(4)), range(3), strict=False):
            pass


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("python_corpus", {}, r"data\.source='python_corpus': gives no images.*Use digits"),
        ("digits:x", {}, r"data\.source='digits:x'.*Use digits\."),
        ("digits", {"train_split": "trian"}, r"data\.train_split='trian'.*mean 'train'\?"),
        ("folder:/nowhere", {}, r"data\.source='folder:/nowhere': is not a folder"),
        ("folder:{}", {"train_split": "test"}, r"data\.train_split='test'.*train, validation"),
        ("folder:{}", {"train_split": "empty"}, r"data\.train_split='empty': has no image"),
        ("tfds:", {}, r"data\.source='tfds:'.*tfds:mnist"),
        ("tfds:/nowhere", {}, r"data\.source='tfds:/nowhere': .*no prepared data set"),
        ("tfds:tiny_pictures", {"train_split": "train[:0]"}, r"is empty in tfds:tiny_pictures"),
        ("tfds:tiny_picture", {}, r"Did you mean 'tfds:tiny_pictures'\?"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_with_what_can(folder, tmp_path, source, arguments, message):
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        open_images(config_of(source.format(folder), tmp_path, **arguments), "train_split")


@pytest.mark.parametrize(("field", "wrong"), [("image_field", "picure"), ("label_field", "knd")])
def test_a_missing_feature_is_told(tmp_path, field, wrong):
    config = config_of("tfds:tiny_pictures", tmp_path)
    config.images.update({field: wrong})
    with pytest.raises(ConfigError, match=rf"images\.{field}='{wrong}'.*Did you mean"):
        open_images(config, "train_split")
