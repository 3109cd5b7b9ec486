"""Images with labels: where they come from, and how they are altered for training."""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

from jaxtpu.config import Config
from jaxtpu.config.vision import ImagesConfig, VisionConfig
from jaxtpu.errors import ConfigError, UserError, nearest

_DIGITS_SIDE, _DIGITS_SEED, _DIGITS_TRAIN = 8, 0, 1437  # four fifths of 1,797
_FILES = {".png", ".jpg", ".jpeg", ".bmp", ".gif"}


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """The examples of one split, read when they are asked for.

    Attributes:
      labels: class of each image, int32 [N].
      classes: names of the classes.
      read: indices [M] -> images, float32 [M, X, Y, C], about 0 in the mean and 1 in deviation.
    """

    labels: np.ndarray
    classes: tuple[str, ...]
    read: Callable[[np.ndarray], np.ndarray]

    def __len__(self) -> int:
        return len(self.labels)


def open_images(config: Config, split_field: str) -> ImageSet:
    """The images that `data.source` names.

    `digits` are the 1,797 handwritten digits of scikit-learn, 8 x 8 pixels, splits `train` and
    `validation`. `folder:DIR` has a folder for each split, and in it a folder of image files for
    each class: DIR/train/cat/1.png. Images are resized to `model.vision.image_size`.

    Args:
      split_field: field of `data` that names the split.

    Raises:
      ConfigError: there is no such source or split, or it cannot give such images.
    """
    kind, _, name = config.data.source.partition(":")
    kinds = {"digits": _digits, "folder": _folder}
    if kind not in kinds:
        raise ConfigError(
            "data.source", config.data.source, "gives no images, which "
            f"model.name={config.model.name} reads.", "Use digits, or folder:DIR.",
        )  # fmt: skip
    found = kinds[kind](name, getattr(config.data, split_field), f"data.{split_field}",
                        config.model.vision)  # fmt: skip
    if len(found) == 0:
        raise ConfigError(
            f"data.{split_field}", getattr(config.data, split_field),
            f"has no image in {config.data.source}.", f"Files end with {', '.join(sorted(_FILES))}.",
        )  # fmt: skip
    return found


def _digits(name: str, split: str, field: str, vision: VisionConfig) -> ImageSet:
    from sklearn.datasets import load_digits

    if name:
        raise ConfigError("data.source", f"digits:{name}", "takes no name.", "Use digits.")
    if split not in ("train", "validation"):
        raise ConfigError(
            field, split, "digits has no such split.", nearest(split, ["train", "validation"])
        )
    if vision.image_size % _DIGITS_SIDE:
        raise ConfigError(
            "model.vision.image_size", vision.image_size, "digits are enlarged by whole numbers.",
            f"Use {_DIGITS_SIDE}.",
        )  # fmt: skip
    data = load_digits()
    order = np.argsort(np.random.Philox(_DIGITS_SEED).random_raw(len(data.target)), kind="stable")
    chosen = order[:_DIGITS_TRAIN] if split == "train" else order[_DIGITS_TRAIN:]
    pixels = (data.images[chosen].astype(np.float32) - 5.0) / 6.0  # 0 to 16: mean 4.9, deviation 6
    labels = data.target[chosen].astype(np.int32)
    times = vision.image_size // _DIGITS_SIDE

    def read(indices: np.ndarray) -> np.ndarray:
        images = pixels[indices].repeat(times, axis=1).repeat(times, axis=2)
        return np.repeat(images[..., None], vision.channels, axis=-1)

    return ImageSet(labels, tuple(str(name) for name in data.target_names), read)


def _folder(name: str, split: str, field: str, vision: VisionConfig) -> ImageSet:
    root = pathlib.Path(name).expanduser()
    if not name or not root.is_dir():
        raise ConfigError(
            "data.source", f"folder:{name}", "is not a folder.",
            "It holds SPLIT/CLASS/*.png, as in folder:pictures with pictures/train/cat/1.png.",
        )  # fmt: skip
    splits = sorted(path.name for path in root.iterdir() if path.is_dir())
    if split not in splits:
        raise ConfigError(field, split, f"{root} has no such folder.", nearest(split, splits))
    # The classes of all splits, so that a class has the same number in each.
    classes = sorted({p.name for s in splits for p in (root / s).iterdir() if p.is_dir()})
    files = [
        (path, number)
        for number, label in enumerate(classes)
        for path in sorted((root / split / label).glob("*"))
        if path.suffix.lower() in _FILES
    ]
    paths = [str(path) for path, _ in files]

    def read(indices: np.ndarray) -> np.ndarray:
        shape = (len(indices), vision.image_size, vision.image_size, vision.channels)
        images = np.empty(shape, np.float32)
        for row, index in enumerate(indices):
            images[row] = _decoded(paths[index], vision)
        return images

    return ImageSet(np.array([label for _, label in files], np.int32), tuple(classes), read)


def _decoded(path: str, vision: VisionConfig) -> np.ndarray:
    """The file's middle square, resized, from -1 to 1.

    Raises:
      UserError: it does not decode; names the file.
    """
    from jaxtpu.data.quiet_tensorflow import import_tensorflow

    tf = import_tensorflow()
    try:
        image = tf.io.decode_image(tf.io.read_file(path), vision.channels, expand_animations=False)
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        reason = error.message.splitlines()[0][:200]
        raise UserError(f"the image {path} cannot be read: {reason}") from error
    height, width = image.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[top : top + side, left : left + side]
    size = (vision.image_size, vision.image_size)
    return tf.image.resize(square, size, antialias=True).numpy() / 127.5 - 1.0


def augmented(
    images: np.ndarray, config: ImagesConfig, random: np.random.Generator, rows
) -> np.ndarray:
    """`images`, the rows `rows` of a global batch, shifted and mirrored.

    The draws are those of the whole batch, so it does not matter which process has which rows.

    Args:
      rows: (their numbers, rows of the whole batch).
    """
    numbers, total = rows
    if config.shift:
        by = config.shift
        offsets = random.integers(0, 2 * by + 1, (total, 2))[numbers]
        padded = np.pad(images, [(0, 0), (by, by), (by, by), (0, 0)], mode="edge")
        X, Y = images.shape[1:3]
        which = np.arange(len(images))[:, None, None]
        x = (offsets[:, :1] + np.arange(X))[:, :, None]
        y = (offsets[:, 1:] + np.arange(Y))[:, None, :]
        images = padded[which, x, y]
    if config.flip:
        mirrored = random.random(total)[numbers] < 0.5
        images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
    return images
