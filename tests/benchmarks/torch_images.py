"""What a plain PyTorch DataLoader does to images: decode, crop, flip, RandAugment, normalise, mix."""

import math
import random

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

_GREY = (125, 125, 125)


def _affine(image, *matrix, way=Image.BILINEAR):
    return image.transform(image.size, Image.AFFINE, matrix, way, fillcolor=_GREY)


def _moved(image, x: float, y: float):
    return _affine(image, 1, 0, round(x), 0, 1, round(y), way=Image.NEAREST)


def _enhance(kind):
    return lambda image, level, sign: kind(image).enhance(1 + sign * 0.9 * level)


OPERATIONS = [
    lambda image, level, sign: image,
    lambda image, level, sign: ImageOps.autocontrast(image),
    lambda image, level, sign: ImageOps.equalize(image),
    lambda image, level, sign: image.rotate(sign * 30 * level, Image.BILINEAR, fillcolor=_GREY),
    lambda image, level, sign: ImageOps.solarize(image, round(255 * (1 - level))),
    lambda image, level, sign: ImageOps.posterize(image, 8 - round(4 * level)),
    *map(
        _enhance,
        (
            ImageEnhance.Color,
            ImageEnhance.Contrast,
            ImageEnhance.Brightness,
            ImageEnhance.Sharpness,
        ),
    ),
    lambda image, level, sign: _affine(image, 1, sign * 0.3 * level, 0, 0, 1, 0),
    lambda image, level, sign: _affine(image, 1, 0, 0, sign * 0.3 * level, 1, 0),
    lambda image, level, sign: _moved(image, sign * 0.3 * level * image.width, 0),
    lambda image, level, sign: _moved(image, 0, sign * 0.3 * level * image.height),
]


class Augmented(torch.utils.data.Dataset):
    """Images of files, altered; float32 [size, size, 3], and the class as probabilities."""

    def __init__(self, paths: list[str], labels: list[int], classes: int, size: int, area: float):
        self.paths, self.labels, self.classes = paths, labels, classes
        self.size, self.area = size, area

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int):
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        image = image.resize((self.size, self.size), Image.BILINEAR, box=self.crop(*image.size))
        if random.random() < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT)
        for _ in range(2):
            image = random.choice(OPERATIONS)(image, 0.5, random.choice((-1, 1)))
        pixels = torch.from_numpy(np.array(image)).to(torch.float32)
        pixels = (pixels / 255 - 0.5) / 0.5
        return pixels, torch.nn.functional.one_hot(torch.tensor(self.labels[index]), self.classes)

    def crop(self, width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = width * height * random.uniform(self.area, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = random.randint(0, width - w), random.randint(0, height - h)
                return left, top, left + w, top + h
        return 0, 0, width, height


def mixed(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """mixup in a worker, as a `collate_fn`."""
    pixels, labels = torch.utils.data.default_collate(batch)
    share = torch.distributions.Beta(0.2, 0.2).sample((len(pixels),)).to(torch.float32)
    order = torch.randperm(len(pixels))
    weight = share[:, None, None, None]
    pixels = weight * pixels + (1 - weight) * pixels[order]
    labels = labels.to(torch.float32)
    return pixels, share[:, None] * labels + (1 - share[:, None]) * labels[order]
