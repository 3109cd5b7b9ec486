"""Batches of images: their order, their places to resume from, and what is done to them."""

import itertools

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from jaxtpu.config import Config
from jaxtpu.data.augment import evaluation_image, training_image
from jaxtpu.data.image_loader import ImageLoader, image_evaluation_batches, training_batches
from jaxtpu.data.images import ImageSet
from jaxtpu.data.order import Position, epoch_order
from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.data.randaugment import OPERATIONS, randaugment
from jaxtpu.errors import ConfigError

tf = import_tensorflow()
COUNT, CLASSES, SIZE, ROWS, SEED = 21, 5, 6, 8, 3
FULL = {"crop_area": 0.2, "shift": 1, "flip": True, "randaugment": 2, "mixup": 0.4}


def pixels_of(number: int, shape=(10, 13, 3)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    """Image n is of the one colour n."""
    one = lambda n: np.full((SIZE, SIZE, 3), n, np.uint8)  # noqa: E731
    files = [tf.io.encode_png(one(n)).numpy() for n in range(COUNT)]
    labels = (np.arange(COUNT) % CLASSES).astype(np.int32)
    return ImageSet(labels, tuple("abcde"), files.__getitem__)


@pytest.fixture(scope="module")
def pictures() -> ImageSet:
    files = [tf.io.encode_png(pixels_of(n)).numpy() for n in range(COUNT)]
    labels = (np.arange(COUNT) % CLASSES).astype(np.int32)
    return ImageSet(labels, tuple("abcde"), files.__getitem__)


def config_of(images=(), **data) -> Config:
    config = Config()
    config.seed = SEED
    config.data.update({"batch_size": ROWS, **data})
    config.model.vision.update({"image_size": SIZE, "classes": CLASSES})
    config.images.update({"mean": (0.0,), "deviation": (1 / 255,), **dict(images)})
    return config


def take(images, config, sharding, start: int, count: int) -> list:
    with ImageLoader(images, config, Position(start, SEED), sharding) as loader:
        return [
            ({name: np.asarray(values) for name, values in batch.items()}, position)
            for batch, position in itertools.islice(loader, count)
        ]


def test_batches_are_the_epochs_one_after_the_other(images, sharding):
    taken = take(images, config_of(), sharding, 0, 6)
    colours = np.concatenate([batch["images"][:, 0, 0, 0] for batch, _ in taken]).round()
    orders = [epoch_order(COUNT, SEED, epoch) for epoch in range(3)]
    assert colours.tolist() == np.concatenate(orders)[: 6 * ROWS].tolist()
    labels = np.concatenate([batch["labels"] for batch, _ in taken])
    assert labels.tolist() == (colours.astype(int) % CLASSES).tolist()
    assert [position.examples for _, position in taken] == [ROWS * n for n in range(1, 7)]
    assert all(batch["weights"].tolist() == [1.0] * ROWS for batch, _ in taken)


def test_a_set_smaller_than_a_batch_is_repeated(images, sharding):
    few = ImageSet(images.labels[:3], images.classes, images.read)
    (batch, _), = take(few, config_of(), sharding, 0, 1)  # fmt: skip
    assert np.bincount(batch["images"][:, 0, 0, 0].round().astype(int)).tolist() == [3, 3, 2] or (
        sorted(np.bincount(batch["images"][:, 0, 0, 0].round().astype(int))) == [2, 3, 3]
    )


@pytest.mark.parametrize("changes", [{}, FULL])
def test_a_resumed_run_gets_the_same_batches(pictures, sharding, changes):
    config = config_of(changes)
    all_ = take(pictures, config, sharding, 0, 5)
    for done in (1, 3):
        rest = take(pictures, config, sharding, all_[done - 1][1].examples, 5 - done)
        for (batch, position), (expected, after) in zip(rest, all_[done:], strict=True):
            assert position == after
            for name, values in expected.items():
                np.testing.assert_array_equal(batch[name], values)


@pytest.mark.parametrize("parts", [[range(4), range(4, 8)], [range(3), range(3, 8)]])
def test_processes_have_the_rows_of_the_same_global_batches(pictures, parts):
    """Shares of processes by hand: as many rows as each would hold."""
    config = config_of(FULL)
    made = lambda rows: list(  # noqa: E731
        itertools.islice(training_batches(pictures, config, 16, np.array(rows)), 3)
    )
    whole, shares = made(range(ROWS)), [made(rows) for rows in parts]
    for number, batch in enumerate(whole):
        for name, values in batch.items():
            together = np.concatenate([share[number][name] for share in shares])
            np.testing.assert_array_equal(together, values)


def test_an_image_is_altered_otherwise_every_time_and_by_every_seed(pictures):
    config = config_of({"crop_area": 0.2, "flip": True})
    data = pictures.read(0)
    made = lambda number, seed: training_image(  # noqa: E731
        data, tf.constant(number, tf.int64), seed, config.images, SIZE, 3
    ).numpy()
    kinds = [made(0, 1), made(1, 1), made(0, 2)]
    np.testing.assert_array_equal(made(0, 1), kinds[0])
    for one, other in itertools.combinations(kinds, 2):
        assert np.abs(one - other).max() > 1


def test_mixed_labels_are_the_shares_of_the_mixed_images(images, sharding):
    config = config_of({"mixup": 0.7})
    (batch, _), = take(images, config, sharding, 0, 1)  # fmt: skip
    order = epoch_order(COUNT, SEED, 0)[:ROWS]
    partners = order[np.arange(ROWS) ^ 1]
    shares = (batch["images"][:, 0, 0, 0] - partners) / (order - partners)
    assert shares.min() >= 0 and shares.max() <= 1 and np.ptp(shares) > 0.1
    of = np.eye(CLASSES)
    expected = (
        shares[:, None] * of[order % CLASSES] + (1 - shares[:, None]) * of[partners % CLASSES]
    )
    np.testing.assert_allclose(batch["labels"], expected, atol=1e-4)


@pytest.mark.parametrize("mixup", [0.0, 0.2])
def test_evaluation_has_every_image_once_and_unaltered(images, sharding, mixup):
    config = config_of({**FULL, "mixup": mixup})
    batches = list(image_evaluation_batches(images, config, sharding))
    weights = np.concatenate([np.asarray(batch["weights"]) for batch in batches])
    colours = np.concatenate([np.asarray(batch["images"])[:, 0, 0, 0] for batch in batches])
    labels = np.concatenate([np.asarray(batch["labels"]) for batch in batches])
    labels = labels.argmax(-1) if mixup else labels
    assert colours[weights == 1].round().tolist() == list(range(COUNT)) and len(batches) == 3
    assert labels[weights == 1].tolist() == images.labels.tolist()
    assert len(list(image_evaluation_batches(images, config, sharding, 2))) == 2


def test_another_seed_is_refused(images, sharding):
    with pytest.raises(ConfigError, match=r"seed=3: .*Use 9\."):
        ImageLoader(images, config_of(), Position(0, 9), sharding)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_random_crops_are_parts_of_the_image(kind):
    """Of an image whose colours are its coordinates, a crop is a linear map of those."""
    x, y = np.meshgrid(np.arange(200), np.arange(120), indexing="xy")
    grid = np.stack([x, y, np.zeros_like(x)], -1).astype(np.uint8)
    encode = {"png": tf.io.encode_png, "jpeg": lambda a: tf.io.encode_jpeg(a, quality=100)}[kind]
    data, config = encode(grid), config_of({"crop_area": 0.3})
    areas = []
    for number in range(24):
        made = training_image(data, tf.constant(number, tf.int64), 0, config.images, 32, 3).numpy()
        x, y = made[..., 0], made[..., 1]
        np.testing.assert_allclose(x, np.broadcast_to(x.mean(0), x.shape), atol=5)
        width, height = (x[:, -1] - x[:, 0]).mean() * 32 / 31, (y[-1] - y[0]).mean() * 32 / 31
        areas.append(width * height / (200 * 120))
        assert 0.7 < width / height < 1.4
    assert 0.25 < min(areas) < 0.5 and 0.6 < max(areas) <= 1.01


def test_evaluation_takes_the_middle():
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, 10:50] = 200
    made = evaluation_image(tf.io.encode_png(image), 20, 3).numpy()
    np.testing.assert_allclose(made, 200, atol=1)


# What Pillow does, at level 0.5 and in the positive direction.
PILLOW = {
    "identity": lambda image: image,
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "solarize": lambda image: ImageOps.solarize(image, 128),
    "posterize": lambda image: ImageOps.posterize(image, 6),
    "color": lambda image: ImageEnhance.Color(image).enhance(1.45),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.45),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.45),
    "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1.45),
    "rotate": lambda image: _affine(
        image, np.cos(np.pi / 12), -np.sin(np.pi / 12), 0, np.sin(np.pi / 12), np.cos(np.pi / 12), 0,
        about_middle=True,
    ),
    "shear_x": lambda image: _affine(image, 1, 0.15, 0, 0, 1, 0),
    "shear_y": lambda image: _affine(image, 1, 0, 0, 0.15, 1, 0),
    "translate_x": lambda image: _affine(image, 1, 0, 6, 0, 1, 0),
    "translate_y": lambda image: _affine(image, 1, 0, 0, 0, 1, 6),
}  # fmt: skip


def _affine(image, a, b, c, d, e, f, about_middle=False):
    """Pillow's coordinates are of corners of pixels, TensorFlow's of their middles."""
    m = (image.width - 1) / 2 if about_middle else 0
    c, f = c + m - a * m - b * m, f + m - d * m - e * m
    c, f = c - 0.5 * (a + b) + 0.5, f - 0.5 * (d + e) + 0.5
    grey = (125,) * 3
    return image.transform(
        image.size, Image.AFFINE, (a, b, c, d, e, f), Image.BILINEAR, fillcolor=grey
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_pillow(name):
    smooth = Image.fromarray(pixels_of(1, (5, 5, 3))).resize((40, 40), Image.BICUBIC)
    smooth = smooth.point(lambda value: 30 + value * 3 // 5)
    ours = OPERATIONS[name](tf.constant(np.asarray(smooth)), 0.5, tf.constant(1.0)).numpy()
    theirs = np.asarray(PILLOW[name](smooth)).astype(int)
    moved = name in ("rotate", "shear_x", "shear_y")
    edge = 10 if moved else 1  # borders are blended otherwise
    inner = (slice(edge, -edge),) * 2
    assert ours.dtype == np.uint8
    assert np.abs(ours.astype(int) - theirs)[inner].max() <= (3 if moved else 1)
    if name != "identity":
        assert np.abs(ours.astype(int) - np.asarray(smooth)).max() > (3 if moved else 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_operation_is_chosen_and_keeps_the_shape(channels):
    image = tf.constant(pixels_of(2, (12, 12, channels)))
    made = {
        randaugment(image, tf.constant([0, n], tf.int64), 0.7).numpy().tobytes() for n in range(120)
    }
    assert len(made) > len(OPERATIONS)  # in both directions
