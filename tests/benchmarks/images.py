"""Images/s to the device with the full augmentation, beside a PyTorch DataLoader's.

    python -m tests.benchmarks.images

Both sides do the same to the same JPEG files of 500 x 375 pixels: decode, random-resized crop to
224 x 224, flip, two RandAugment operations, normalise, mix; shuffled, in batches of 64, by turns.
The DataLoader has as many workers as there are cores, with torch and Pillow; ours as many threads.
A turn is one pass over the files that does not count, as worker processes and TensorFlow's graph
start in it, and then several that do. Pillow averages also where it makes an image less than half as
small again; ours does not, as no pixel falls between those that are read.
"""

import itertools
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np

from jaxtpu import environment

FILES, SIZE, ROWS, CLASSES, AREA, WORKERS, TURNS, PASSES = 640, 224, 64, 10, 0.08, 2, 5, 4
_BAR = 1.5


def main() -> int:
    """0 where the bar is met."""
    environment.prepare(1, platform="cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_images(pathlib.Path(folder))
        ours, theirs = ours_in(folder), theirs_in(folder)
        next(ours), next(theirs)  # neither side's start counts
        pairs = [(next(ours), next(theirs)) for _ in range(TURNS)]
    ratios = sorted(a / b for a, b in pairs)
    ratio = ratios[len(ratios) // 2]
    rates = [np.median(side) for side in zip(*pairs, strict=True)]
    print(
        f"{TURNS} turns of {PASSES} x {FILES} images, {WORKERS} workers; medians, in brackets the extremes"
    )
    print(f"ours {rates[0]:,.0f} images/s, DataLoader {rates[1]:,.0f} images/s: {ratio:.2f} "
          f"[{ratios[0]:.2f}, {ratios[-1]:.2f}] (bar {_BAR:g}: {'met' if ratio >= _BAR else 'missed'})")  # fmt: skip
    return 0 if ratio >= _BAR else 1


def write_images(folder: pathlib.Path) -> None:
    """Smooth noise, as much of a JPEG file as a photograph: about 50 kB."""
    from PIL import Image

    for number in range(FILES):
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (47, 63, 3), np.uint8))
        pixels = np.asarray(coarse.resize((500, 375), Image.BICUBIC), np.int16)
        noisy = pixels + random.normal(0, 9, pixels.shape)
        path = folder / "train" / str(number % CLASSES) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=85)


def ours_in(folder: str):
    """Images/s of one turn after the other."""
    from jax.sharding import SingleDeviceSharding

    from jaxtpu.config import Config
    from jaxtpu.data.image_loader import ImageLoader
    from jaxtpu.data.images import open_images
    from jaxtpu.data.order import Position

    config = Config()
    config.data.update({"source": f"folder:{folder}", "batch_size": ROWS, "directory": folder})
    config.model.vision.update({"image_size": SIZE, "classes": CLASSES})
    config.images.update({"crop_area": AREA, "flip": True, "randaugment": 2, "mixup": 0.2})
    images = open_images(config, "train_split")
    sharding = SingleDeviceSharding(jax.devices()[0])
    while True:  # a loader for each turn: a loader that waits would fill its queue meanwhile
        with ImageLoader(images, config, Position(0, config.seed), sharding) as loader:
            for timed in (1, PASSES):
                start = time.perf_counter()
                for batch, _ in itertools.islice(loader, timed * FILES // ROWS):
                    jax.block_until_ready(batch)
            yield PASSES * FILES / (time.perf_counter() - start)


def theirs_in(folder: str):
    """The same of a DataLoader."""
    import torch

    from tests.benchmarks.torch_images import Augmented, mixed

    paths = sorted(map(str, pathlib.Path(folder).glob("train/*/*.jpg")))
    labels = [int(pathlib.Path(path).parent.name) for path in paths]
    dataset = Augmented(paths, labels, CLASSES, SIZE, AREA)
    while True:
        loader = torch.utils.data.DataLoader(
            dataset, ROWS, shuffle=True, num_workers=WORKERS, collate_fn=mixed, drop_last=True,
            persistent_workers=True,
        )  # fmt: skip
        for timed in (1, PASSES):
            start = time.perf_counter()
            for batch in itertools.chain.from_iterable(itertools.repeat(loader, timed)):
                jax.block_until_ready([jax.device_put(values.numpy()) for values in batch])
        yield PASSES * FILES / (time.perf_counter() - start)
        del loader  # with its processes


if __name__ == "__main__":
    sys.exit(main())
