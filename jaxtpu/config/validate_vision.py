"""Checks across the fields of a model that reads images."""

from jaxtpu.config.schema import Config, OptimizerConfig
from jaxtpu.errors import ConfigError, nearest_multiples


def finalize_vision(config: Config, classes: int) -> None:
    """Fills in the fields that were left to be derived, and checks that they fit together.

    Args:
      config: changed in place; its examples are one image long, so that tokens mean images.
      classes: of the data.

    Raises:
      ConfigError: names the field, its value, and a value that works.
    """
    model, vision = config.model, config.model.vision
    if config.optimizer.no_decay == OptimizerConfig().no_decay:  # written for models of text
        norms = () if model.name == "mlp" else (".*/scale",)
        config.optimizer.no_decay = (*norms, ".*/bias")
    config.data.sequence_length = 1
    vision.classes = vision.classes or classes
    if vision.classes < classes:
        raise ConfigError(
            "model.vision.classes", vision.classes, f"the data have labels of {classes} classes.",
            f"Use {classes}, or 0 to take the data's.",
        )  # fmt: skip
    if vision.classes < 2:
        raise ConfigError("model.vision.classes", vision.classes, "must be at least 2.", "Use 10.")
    if model.name in ("vit", "mixer") and vision.image_size % vision.patch:
        size = vision.image_size
        best = next(n for n in range(min(vision.patch, size), 0, -1) if size % n == 0)
        raise ConfigError(
            "model.vision.patch", vision.patch, f"does not divide model.vision.image_size={size}.",
            f"Use {best}.",
        )  # fmt: skip
    if model.name == "vit":
        _check_vit(config)
    if model.name == "resnet" and not (vision.stages and min(vision.stages) >= 1):
        raise ConfigError(
            "model.vision.stages", vision.stages, "needs at least a block in each stage.",
            "Use 3,4,6,3.",
        )  # fmt: skip


def _check_vit(config: Config) -> None:
    model = config.model
    model.kv_heads = model.kv_heads or model.heads
    if model.kv_heads != model.heads:
        raise ConfigError(
            "model.kv_heads", model.kv_heads, "vit has as many key heads as query heads.", "Use 0."
        )
    if not model.head_dim:
        if model.embed % model.heads:
            raise ConfigError(
                "model.embed", model.embed, f"is not divided by model.heads={model.heads}.",
                f"{nearest_multiples(model.embed, model.heads)[:-1]}, or set model.head_dim.",
            )  # fmt: skip
        model.head_dim = model.embed // model.heads
    if model.vision.positions == "sincos" and model.embed % 4:
        raise ConfigError(
            "model.embed", model.embed,
            "is divided in four by model.vision.positions=sincos: sines and cosines of rows and "
            "columns.", nearest_multiples(model.embed, 4),
        )  # fmt: skip
