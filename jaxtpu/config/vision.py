"""The sections of models that read images: `model.vision`, and `images`, how those are altered."""

import dataclasses

from jaxtpu.config.section import Section, option

VISION_MODELS = ("vit", "resnet", "mixer", "mlp")


@dataclasses.dataclass
class VisionConfig(Section, path="model.vision"):
    """Models that read images; model.layers, embed, heads and mlp are theirs too."""

    image_size: int = option(32, "height and width of an image, pixels", at_least=1)
    channels: int = option(3, "of an image: 3 for colours, 1 for grey", at_least=1)
    classes: int = option(0, "classes of the labels; 0 takes the data's", at_least=0)
    patch: int = option(4, "height and width of a patch, pixels (vit, mixer)", at_least=1)
    positions: str = option(
        "learned",
        "of patches (vit): learned, or sincos (fixed sines and cosines of row and column)",
        choices=("learned", "sincos"),
    )
    registers: int = option(
        0, "learned tokens beside the patches, which nothing is read from (vit)", at_least=0
    )
    pool: str = option(
        "cls",
        "what the head reads (vit): cls (a learned token), or mean (of the patches)",
        choices=("cls", "mean"),
    )
    token_mlp: int = option(
        256, "hidden features of the MLP that mixes patches (mixer)", at_least=1
    )
    stages: tuple[int, ...] = option(
        (3, 4, 6, 3), "blocks of each stage (resnet): 3,4,6,3 is ResNet-50"
    )
    width: int = option(64, "channels of the first stage's blocks (resnet)", at_least=1)
    stem: str = option(
        "imagenet",
        "first layers (resnet): imagenet (7 x 7 with stride 2, and a max-pool), or small (3 x 3), "
        "for images of 64 pixels and less",
        choices=("imagenet", "small"),
    )
    norm: str = option(
        "batch",
        "normalisation (resnet): batch (statistics of the whole global batch; of each microbatch "
        "by itself), or group (of each image by itself)",
        choices=("batch", "group"),
    )
    groups: int = option(32, "groups of channels (norm=group)", at_least=1)
    momentum: float = option(
        0.9, "share of the running averages that stays at each step (norm=batch)",
        at_least=0.0, below=1.0,
    )  # fmt: skip


@dataclasses.dataclass
class ImagesConfig(Section, path="images"):
    """How images are read, and altered for training; evaluation takes their middle, unaltered."""

    image_field: str = option("image", "name of the TFDS feature that holds the image")
    label_field: str = option("label", "name of the TFDS feature that holds the class")
    mean: tuple[float, ...] = option(
        (0.5,), "of a pixel from 0 to 1, for every channel or for each; taken off"
    )
    deviation: tuple[float, ...] = option(
        (0.5,), "standard deviation of a pixel from 0 to 1, likewise; divided by"
    )
    crop_area: float = option(
        1.0,
        "least part of the area that a random-resized crop takes, sides 3:4 to 4:3 "
        "(arXiv:1409.4842), often 0.08; 1 takes the middle square",
        at_least=0.01,
    )
    shift: int = option(0, "largest random shift in each direction, pixels", at_least=0)
    flip: bool = option(False, "mirror half of the images left to right")
    randaugment: int = option(
        0, "random operations on each image (arXiv:1909.13719), often 2; 0 for none", at_least=0
    )
    magnitude: float = option(
        5.0, "strength of those operations, 0 to 10", at_least=0.0, below=10.01
    )
    mixup: float = option(
        0.0,
        "mix each image and its label with another one's: the shares are of a beta distribution "
        "with these two parameters (arXiv:1710.09412), often 0.2; 0 for no mixing",
        at_least=0.0,
    )
