"""Images with labels: where they come from, each found by its number, every record accounted for.

Before training each file is decoded once, so that what cannot be used is known, told, and in no
batch; the result is kept, and looked up by later runs.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jaxtpu.config import Config
from jaxtpu.data.augment import decoded
from jaxtpu.data.image_cache import Kept, KeptImages, identity_key
from jaxtpu.data.progress import told_if_slow
from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.data.records import BadRecord, Counts
from jaxtpu.data.sources import TfdsSplits, tfds_builder
from jaxtpu.data.tokenise import check_counts
from jaxtpu.errors import ConfigError, nearest

_DIGITS_SEED, _DIGITS_TRAIN = 0, 1437  # four fifths of 1,797
_FILES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_TOGETHER = 256  # files checked together, by all cores


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """The images of one split that can be used.

    Attributes:
      labels: class of each image, int32 [N].
      classes: names of the classes.
      read: number of an image -> the bytes of its file; called from several threads.
      counts: what became of the records.
      num_bytes: of text: none.
    """

    labels: np.ndarray
    classes: tuple[str, ...]
    read: Callable[[int], bytes]
    counts: Counts = Counts()  # noqa: RUF009 (frozen)
    num_bytes: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def examples(self, sequence_length: int = 1, *, partial: bool = False) -> int:
        """Images, by the name that streams of tokens have for it."""
        return len(self)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A record of a source: bytes of a file and its label, or what is wrong with it."""

    place: str
    data: bytes
    label: int


def open_images(config: Config, split_field: str) -> ImageSet:
    """The images that `data.source` names.

    - `digits`: the 1,797 handwritten digits of scikit-learn, 8 x 8 pixels, in the splits `train`
      and `validation`.
    - `folder:DIR`: a folder for each split, and in it a folder of files for each class, as in
      DIR/train/cat/1.png; decoded from where they are.
    - `tfds:NAME`: with an image and a class label, in any split of TFDS; the encoded files are
      copied into one file once, where each is found by its number.

    Args:
      split_field: field of `data` that names the split.

    Raises:
      ConfigError: there is no such source or split, or it has no images with labels.
      UserError: more records than `data.max_bad` cannot be used; the first is named.
    """
    kind, _, name = config.data.source.partition(":")
    kinds = {"digits": _digits, "folder": _folder, "tfds": _tfds}
    if kind not in kinds:
        raise ConfigError(
            "data.source", config.data.source, "gives no images.",
            "Use digits, folder:DIR, or tfds:NAME.",
        )  # fmt: skip
    images = kinds[kind](config, name, getattr(config.data, split_field), f"data.{split_field}")
    if len(images) == 0:
        raise ConfigError(
            f"data.{split_field}", getattr(config.data, split_field),
            f"has no image in {config.data.source}.", f"Files end with {', '.join(_FILES)}.",
        )  # fmt: skip
    return images


def _digits(config: Config, name: str, split: str, field: str) -> ImageSet:
    from sklearn.datasets import load_digits

    if name:
        raise ConfigError("data.source", f"digits:{name}", "takes no name.", "Use digits.")
    splits = ("train", "validation")
    if split not in splits:
        raise ConfigError(field, split, "digits has no such split.", nearest(split, splits))
    tf = import_tensorflow()
    data = load_digits()
    order = np.argsort(np.random.Philox(_DIGITS_SEED).random_raw(len(data.target)), kind="stable")
    chosen = order[:_DIGITS_TRAIN] if split == "train" else order[_DIGITS_TRAIN:]
    pixels = np.round(data.images[chosen] * 255 / 16).astype(np.uint8)[..., None]
    files = [tf.io.encode_png(image, compression=0).numpy() for image in pixels]
    labels = data.target[chosen].astype(np.int32)
    count = len(files)
    names = tuple(str(name) for name in data.target_names)
    return ImageSet(labels, names, files.__getitem__, Counts(read=count, used=count))


def _folder(config: Config, name: str, split: str, field: str) -> ImageSet:
    root = pathlib.Path(name).expanduser()
    if not name or not root.is_dir():
        raise ConfigError(
            "data.source", f"folder:{name}", "is not a folder.",
            "It holds SPLIT/CLASS/*.png, as in folder:pictures with pictures/train/cat/1.png.",
        )  # fmt: skip
    splits = sorted(path.name for path in root.iterdir() if path.is_dir())
    if split not in splits:
        advice = nearest(split, splits) if splits else "Make it."
        raise ConfigError(field, split, f"{root} has no such folder.", advice)
    # The classes of all splits, so that a class has the same number in each.
    classes = sorted({p.name for s in splits for p in (root / s).iterdir() if p.is_dir()})
    paths, labels = [], []
    for number, label in enumerate(classes):
        found = (p for p in (root / split / label).glob("**/*") if p.suffix.lower() in _FILES)
        for path in sorted(found):
            paths.append(str(path))
            labels.append(number)
    stats = [(path, os.stat(path)) for path in paths]
    seen = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    key = identity_key(config, split, [seen, labels])
    found = (
        _Found(path, pathlib.Path(path).read_bytes(), label)
        for path, label in zip(paths, labels, strict=True)
    )
    kept = _once(config, key, split, found, len(classes), copy=False)
    usable = [paths[number] for number in kept.numbers]
    read = lambda index: pathlib.Path(usable[index]).read_bytes()  # noqa: E731
    return ImageSet(kept.labels, tuple(classes), read, kept.counts)


def _tfds(config: Config, name: str, split: str, field: str) -> ImageSet:
    if not name:
        raise ConfigError(
            "data.source", config.data.source, "names nothing to read.", "For example: tfds:mnist"
        )
    from jaxtpu.data.quiet_tensorflow import import_tfds

    tfds = import_tfds()
    source = config.data.source
    directory = pathlib.Path(config.data.directory).expanduser()
    builder = tfds_builder(source, name, directory)
    kinds = {"image": tfds.features.Image, "label": tfds.features.ClassLabel}
    names = {"image": config.images.image_field, "label": config.images.label_field}
    for what, kind in kinds.items():
        features = dict(getattr(builder.info.features, "items", dict)())
        there = [name for name, feature in features.items() if type(feature) is kind]
        if names[what] not in there:
            advice = nearest(names[what], there) if there else "Choose another data.source."
            problem = f"{source} has no {kind.__name__} of that name."
            raise ConfigError(f"images.{what}_field", names[what], problem, advice)
    label = builder.info.features[names["label"]]
    splits = TfdsSplits(source, builder)

    def found() -> Iterator[_Found]:
        undecoded = {names["image"]: tfds.decode.SkipDecoding()}
        for number, example in enumerate(splits.examples(split, field, undecoded), 1):
            place = f"{source}, split {split}, record {number}"
            yield _Found(place, example[names["image"]], int(example[names["label"]]))

    key = identity_key(config, split, [splits.version, names])
    kept = _once(config, key, split, found(), label.num_classes, copy=True)
    names = tuple(label.names or map(str, range(label.num_classes)))
    return ImageSet(kept.labels, names, kept.read, kept.counts)


def _once(
    config: Config, key: str, split: str, found: Iterable[_Found], classes: int, *, copy: bool
) -> Kept:
    """The usable records of `found`, from the cache where they have been looked at before.

    Args:
      copy: whether their bytes are kept too.
    """
    cache = KeptImages(config.data.directory, key)
    kept = cache.read()
    if kept is None:
        with told_if_slow(f"Checking the images of {config.data.source}, split {split}"):
            kept = _look_at(cache, config, found, classes, copy)
    return kept


def _look_at(
    cache: KeptImages, config: Config, found: Iterable[_Found], classes: int, copy: bool
) -> Kept:
    tally, numbers, labels = Counts(), [], []
    channels = config.model.vision.channels
    found = iter(found)
    with cache.writing(copy) as write, concurrent.futures.ThreadPoolExecutor() as threads:
        while chunk := list(itertools.islice(found, _TOGETHER)):
            wrong = list(threads.map(lambda one: _problem(one, classes, channels), chunk))
            for number, (one, problem) in enumerate(zip(chunk, wrong, strict=True), tally.read):
                if problem is None:
                    numbers.append(number)
                    labels.append(one.label)
                    write(one.data)
            bad = [problem for problem in wrong if problem is not None]
            first = tally.first_bad or (str(bad[0]) if bad else "")
            tally = Counts(tally.read + len(chunk), len(numbers), 0, tally.bad + len(bad), first)
            if config.data.max_bad == 0.0:
                check_counts(tally, config.data.source, 0.0)
        check_counts(tally, config.data.source, config.data.max_bad)
        return cache.finish(np.array(numbers, np.int64), np.array(labels, np.int32), tally)


def _problem(one: _Found, classes: int, channels: int) -> BadRecord | None:
    """What is wrong with a record; None where it can be used."""
    tf = import_tensorflow()
    if not 0 <= one.label < classes:
        return BadRecord(one.place, f"label {one.label} is not one of 0 to {classes - 1}")
    try:
        shape = decoded(one.data, channels).shape
    except tf.errors.OpError as error:
        return BadRecord(one.place, f"is no image: {error.message.splitlines()[0][:200]}")
    return BadRecord(one.place, "is an empty image") if 0 in tuple(shape) else None
