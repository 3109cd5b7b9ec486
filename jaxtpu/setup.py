"""What every verb starts with: the configuration checked, the data open, the programs derived."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Set
from typing import Any

import jax

from jaxtpu.checkpoint.folder import directory_of
from jaxtpu.checkpoint.store import versions
from jaxtpu.config import Config, RunUnits, finalize, leaves, load, run_units
from jaxtpu.config.vision import VISION_MODELS
from jaxtpu.data.image_loader import ImageLoader, image_evaluation_batches
from jaxtpu.data.images import open_images
from jaxtpu.data.loader import TrainLoader, evaluation_batches
from jaxtpu.data.order import Position
from jaxtpu.data.streams import open_split, over_a_run
from jaxtpu.data.tokenizer import Tokenizer, make_tokenizer
from jaxtpu.errors import ConfigError
from jaxtpu.mesh import make_mesh
from jaxtpu.observe.console import make_console
from jaxtpu.plan.auto import take_plan
from jaxtpu.train.programs import Programs, build_programs

# A run's folder holds one model on one stream of examples: these fields cannot change under it.
_FIXED = ("seed", "model.", "data.source", "data.mixture", "data.train_split", "data.tokenizer",
          "data.separator", "data.text_field", "data.answer_field", "data.packing",
          "data.validation_percent", "data.sequence_length", "precision.params", "optimizer.name",
          "optimizer.rounding", "optimizer.accumulate_steps")  # fmt: skip
_FREE = ("model.attention", "model.remat", "model.remat_tensors", "model.remat_group")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What training, evaluation and generation have in common.

    Attributes:
      config: finalized.
      tokenizer: of the data; None where those are images.
      stream: training examples: a stream of tokens, packed or not, a mixture of those, or images.
      validation: validation examples; None without a validation split.
      units: length of the run.
      programs: for the devices present.
    """

    config: Config
    tokenizer: Tokenizer | None
    stream: Any
    validation: Any | None
    units: RunUnits
    programs: Programs


def set_up(config: Config, given: Set[str] = frozenset()) -> Setup:
    """Checks the configuration, opens the data, derives the programs; compiles nothing.

    Raises:
      ConfigError: something does not fit together.
    """
    devices = _device_count()
    if config.model.name in VISION_MODELS:
        return _set_up_images(config, devices)
    tokenizer = make_tokenizer(config.data.tokenizer, config.data.separator)
    if config.mesh.auto:
        config = take_plan(config, given, jax.devices(), tokenizer.vocab_size, make_console())
    sizes = finalize(config, devices, tokenizer.vocab_size)
    stream = open_split(config.data, "train_split", tokenizer)
    evaluated = bool(config.data.validation_split)
    validation = open_split(config.data, "validation_split", tokenizer) if evaluated else None
    units = run_units(config, stream.examples(config.data.sequence_length))
    stream = over_a_run(stream, units.steps * config.data.batch_size)
    programs = build_programs(config, make_mesh(sizes), units)
    return Setup(config, tokenizer, stream, validation, units, programs)


def _set_up_images(config: Config, devices: int) -> Setup:
    if config.mesh.auto:
        raise ConfigError(
            "mesh", "auto", f"plans are made for models of text, not model.name="
            f"{config.model.name}.", "Use mesh.data=1 and mesh.fsdp=-1.",
        )  # fmt: skip
    images = open_images(config, "train_split")
    validation = open_images(config, "validation_split") if config.data.validation_split else None
    sizes = finalize(config, devices, len(images.classes))
    units = run_units(config, len(images))
    programs = build_programs(config, make_mesh(sizes), units)
    return Setup(config, None, images, validation, units, programs)


def train_loader(setup: Setup, position: Position) -> TrainLoader | ImageLoader:
    """The training batches from `position` on."""
    config, sharding = setup.config, setup.programs.batch_sharding
    if setup.tokenizer is None:
        return ImageLoader(setup.stream, config, position, sharding)
    return TrainLoader(
        setup.stream,
        batch_size=config.data.batch_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
        start=position,
        sharding=sharding,
        prefetch=config.data.prefetch,
    )


def validation_batches(setup: Setup) -> Iterator[dict[str, jax.Array]]:
    """The batches of one evaluation."""
    config, sharding = setup.config, setup.programs.batch_sharding
    most = config.train.evaluate_batches or None
    if setup.tokenizer is None:
        return image_evaluation_batches(setup.validation, config, sharding, most)
    return evaluation_batches(
        setup.validation,
        batch_size=config.data.batch_size,
        sequence_length=config.data.sequence_length,
        sharding=sharding,
        max_batches=most,
    )


def fingerprint(config: Config) -> dict[str, str]:
    """What all processes of a run must have in common, by name."""
    text = json.dumps(config.to_dict(), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {"a config of hash": digest} | versions()


def _device_count() -> int:
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:  # what JAX raises without the platform
        reason = (str(error).splitlines() or ["it has no device"])[0]
        raise ConfigError(
            "JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", ""), f"does not start: {reason}",
            "Unset it, or use cpu.",
        ) from error  # fmt: skip


def use_compile_cache(directory: str) -> None:
    """Compiled programs are kept in `directory`, so that the next start is quick.

    Raises:
      ConfigError: the folder cannot be written.
    """
    folder = pathlib.Path(directory).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "compile_cache", directory, f"cannot be written: {error.strerror}.",
            "Use --config.compile_cache= for none.",
        ) from None  # fmt: skip
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def check_workdir(config: Config) -> None:
    """Makes the folder of the run, after checking that it is not another run's.

    Raises:
      ConfigError: it is another run's, or it cannot be made.
    """
    path = pathlib.Path(config.workdir).expanduser() / "config.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(config.workdir, error) from None
    new = dict(leaves(config))
    if path.exists() and directory_of(config.workdir, config.checkpoint).exists():
        try:
            before = load(str(path))
        except ConfigError as error:
            raise ConfigError(
                "--workdir", config.workdir, f"it is not known whose run it holds: {error}",
                "Choose another --workdir, or delete that one.",
            ) from None  # fmt: skip
        for name, value in leaves(before):
            if name.startswith(_FIXED) and name not in _FREE and new[name] != value:
                raise ConfigError(
                    name, new[name], f"the run in {config.workdir} has {value!r}.",
                    "Choose another --workdir, or delete that one.",
                )  # fmt: skip


@contextlib.contextmanager
def locked(workdir: str):
    """Keeps a second run out of the folder for as long as this one lives, however it ends.

    Raises:
      ConfigError: a run is in it.
    """
    with (pathlib.Path(workdir).expanduser() / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "--workdir", workdir, "another run is in this folder.",
                "Wait for it, or choose another --workdir.",
            ) from None  # fmt: skip
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                raise
        yield


def write_config(config: Config) -> None:
    """Writes the resolved configuration, by which the run can be repeated.

    Raises:
      ConfigError: the folder cannot be written.
    """
    path = pathlib.Path(config.workdir).expanduser() / "config.json"
    if jax.process_index() != 0:
        return
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        raise _unwritable(config.workdir, error) from None


def _unwritable(workdir: str, error: OSError) -> ConfigError:
    return ConfigError(
        "--workdir", workdir, f"cannot be written: {error.strerror}.",
        "For example: --workdir=runs/quickstart",
    )  # fmt: skip
