"""A folder as Hugging Face has them: config.json, safetensors files, tokenizer files."""

import json
import pathlib
import shutil
from typing import Any

from jaxtpu.config import Config, ModelConfig
from jaxtpu.config.data import DataConfig
from jaxtpu.config.load import apply_overrides
from jaxtpu.errors import ConfigError
from jaxtpu.interop.families import Family, family_of, flat_fields
from jaxtpu.interop.safetensors_file import SafetensorsFile

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


class HuggingFaceFolder:
    """A model in a folder.

    Attributes:
      path: the folder.
      hf: its config.json.
      family: its architecture.

    Raises:
      ConfigError: it is no such folder, or its architecture is not supported.
    """

    def __init__(self, folder: str, field: str = "--from"):
        self.path, self.field = pathlib.Path(folder).expanduser(), field
        if not (self.path / "config.json").is_file():
            raise ConfigError(
                field, folder, "holds no config.json.",
                "Give the folder of a Hugging Face model: config.json and *.safetensors.",
            )  # fmt: skip
        self.hf = self._json("config.json")
        self.family: Family = family_of(self.hf, folder)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                self.field, str(self.path / name), f"cannot be read: {error}.", "Download it again."
            ) from None

    def model_fields(self) -> dict[str, Any]:
        """Fields of `config.model`, by dotted name below it."""
        return self.family.model_fields(self.hf)

    def adopt(self, model: ModelConfig) -> None:
        """Sets the fields of `model` to the folder's, which what was set must agree with.

        Raises:
          ConfigError: a field was set to something else.
        """
        theirs, ours, default = self.model_fields(), flat_fields(model), flat_fields(ModelConfig())
        # What is derived from other fields, or taken from the tokenizer, has not been set.
        for name, value in theirs.items():
            free = name.startswith("moe.router_")
            if ours[name] not in (default[name], value) and not free:
                raise ConfigError(
                    f"model.{name}", ours[name], f"the model in {self.path} has {value!r}.",
                    "Leave the field out, or use that value.",
                )  # fmt: skip
            if not free or ours[name] == default[name]:
                model.update({name: value})

    def files(self) -> list[SafetensorsFile]:
        """The files with the weights.

        Raises:
          ConfigError: there are none; formats that can run code when they are read are not read.
        """
        if (self.path / INDEX).is_file():
            names = sorted(set(self._json(INDEX)["weight_map"].values()))
        else:
            names = sorted(path.name for path in self.path.glob("*.safetensors"))
        if missing := [name for name in names if not (self.path / name).is_file()]:
            raise ConfigError(
                self.field, str(self.path), f"lacks {missing[0]}, which its index names.",
                "Download it again.",
            )  # fmt: skip
        if not names:
            others = sorted(p.name for p in self.path.glob("*.bin")) or ["none at all"]
            raise ConfigError(
                self.field, str(self.path),
                f"holds no weights in safetensors files (but {others[0]}); pickled ones are not read.",
                "Download the safetensors, or save it with save_pretrained.",
            )  # fmt: skip
        return [SafetensorsFile(self.path / name) for name in names]


def copy_tokenizer(folder: pathlib.Path, to: pathlib.Path) -> bool:
    """Copies a tokenizer's files, byte for byte; whether there is a tokenizer.json among them."""
    to.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
    return (to / "tokenizer.json").is_file()


def adopt_weights(config: Config) -> None:
    """Sets what the folder of `config.weights` says: the fields of the model, and the tokenizer
    where none is set. A run that goes on from a checkpoint has both, and may lack the folder.

    Raises:
      ConfigError: it is no folder of a supported model, or a field was set to something else.
    """
    folder = pathlib.Path(config.weights).expanduser()
    if not folder.exists() and (pathlib.Path(config.workdir).expanduser() / "checkpoints").exists():
        return
    HuggingFaceFolder(config.weights, "weights").adopt(config.model)
    if config.data.tokenizer == DataConfig().tokenizer and (folder / "tokenizer.json").is_file():
        config.data.tokenizer = f"hf:{config.weights}"


def config_for(folder: str, config: Config | None, overrides: list[tuple[str, str]]) -> Config:
    """The configuration of a run that starts from `folder`.

    Args:
      config: with `overrides` in it; None for one of defaults, to which they are applied.

    Raises:
      ConfigError: as `HuggingFaceFolder` and `adopt`; or the model cannot have such sequences.
    """
    opened = HuggingFaceFolder(folder)
    if config is None:
        config = Config()
        config.name = opened.path.resolve().name
        config.workdir, config.train.steps = f"runs/{config.name}", 1000
        most = opened.model_fields()["text.max_position_embeddings"]
        config.data.sequence_length = min(config.data.sequence_length, most)
        apply_overrides(config, overrides)
    opened.adopt(config.model)
    return config
