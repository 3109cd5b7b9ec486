"""Rows of the start-up table: a model that reads images, and what overrides of the model saved."""

from typing import Any

import jax

from jaxtpu.config import Config, ModelConfig, finalize
from jaxtpu.errors import ConfigError
from jaxtpu.models import make_model
from jaxtpu.observe.console import count
from jaxtpu.precision import make_precision
from jaxtpu.train.programs import Programs


def image_model(model: ModelConfig) -> str:
    """Its depth and widths, and the images that it reads."""
    vision = model.vision
    patches = f"patches of {vision.patch} x {vision.patch}"
    shape = {
        "vit": f"{model.layers} layers, embed {model.embed}, {model.heads} heads of "
        f"{model.head_dim}, mlp {model.mlp}, {patches}, {vision.positions} positions, "
        f"{vision.registers} registers, {vision.pool} pooling",
        "mixer": f"{model.layers} layers, embed {model.embed}, mlp {model.mlp}, over patches "
        f"{vision.token_mlp}, {patches}",
        "mlp": f"{model.layers} layers of {model.embed}",
        "resnet": f"stages of {', '.join(map(str, vision.stages))} blocks from {vision.width} "
        f"channels, {vision.norm} normalisation",
    }[model.name]
    return (
        f"{model.name}: {shape}; images {vision.image_size} x {vision.image_size} x "
        f"{vision.channels}, {vision.classes} classes"
    )


def image_rows(config: Config, images: Any) -> list[tuple[str, str]]:
    """The batch, the data, and how they are altered."""
    how = config.images
    altered = [f"shifted by up to {how.shift} pixels"] if how.shift else []
    altered += ["mirrored"] if how.flip else []
    altered += [f"mixed (mixup {how.mixup:g})"] if how.mixup else []
    averaged = f"; evaluated with averaged weights ({config.optimizer.average:g} a step)"
    return [
        (
            "batch",
            f"{config.data.batch_size} images a step"
            + (f", {', '.join(altered)}" if altered else "")
            + (averaged if config.optimizer.average else ""),
        ),
        ("data", f"{config.data.source}: {len(images):,} images of {len(images.classes)} classes"),
    ]


def saved_rows(config: Config, base: Config | None, programs: Programs) -> list[tuple[str, str]]:
    """What the command line's changes of the model save, or cost, beside the config file's own."""
    if base is None:
        return []
    own = Config()
    own.update(config.to_dict() | {"model": base.model.to_dict()})
    sizes = config.model.vision.classes or config.model.vocab_size
    try:
        finalize(own, programs.mesh.size, sizes)
    except ConfigError:  # the file alone makes no model: there is nothing to compare with
        return []
    before = make_model(own.model, make_precision(own.precision), own.data.sequence_length)
    numbers = [
        (sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params)), model.flops_per_token)
        for model in (before, programs.model)
    ]
    article, unit = ("an", "image") if programs.model.task == "classification" else ("a", "token")
    words = [
        f"{name} {count(new)} instead of {count(old)} ({new / old - 1:+.0%})"
        for name, old, new in zip(("parameters", f"FLOPs {article} {unit}"), *numbers, strict=True)
    ]
    return [("beside the file", ", ".join(words))]
