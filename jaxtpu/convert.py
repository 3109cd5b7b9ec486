"""Runs from Hugging Face models, and Hugging Face models from runs."""

import copy
import pathlib

import jax

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.config import Config, finalize, run_units
from jaxtpu.data.order import Position
from jaxtpu.data.tokenizer import make_tokenizer
from jaxtpu.errors import EXIT_OK, ConfigError
from jaxtpu.interop.folder import copy_tokenizer
from jaxtpu.interop.read import initial_state
from jaxtpu.interop.write import write_folder
from jaxtpu.mesh import make_mesh
from jaxtpu.observe import console as screen
from jaxtpu.setup import check_workdir, locked, write_config
from jaxtpu.train.programs import Programs, build_programs

_DTYPES = ("float32", "bfloat16", "float16")


def import_run(config: Config, folder: str) -> int:
    """Makes the run in `config.workdir` from the model in `folder`: its checkpoint of step 0, its
    configuration, and the tokenizer.

    Raises:
      ConfigError: the folder or the configuration does not fit, or the run has checkpoints already.
    """
    out = screen.make_console()
    check_workdir(config)
    with locked(config.workdir):
        checkpoints = Checkpoints(config.workdir, config.checkpoint, {"config": config.to_dict()})
        try:
            if checkpoints.latest_step is not None:
                raise ConfigError(
                    "--workdir", config.workdir, f"has checkpoints (steps {checkpoints.kept}).",
                    "Choose another --workdir, or delete that one.",
                )  # fmt: skip
            _take_tokenizer(config, folder)
            programs = _programs(config)
            source = copy.deepcopy(config)
            source.weights = folder
            with screen.busy(out, f"read {folder}"):
                state = jax.block_until_ready(initial_state(source, programs, "--from"))
            write_config(config)
            with screen.busy(out, "saved"):
                checkpoints.save(0, state, Position(0, config.seed).to_json(), None)
                checkpoints.wait()
        finally:
            checkpoints.close()
    number = sum(leaf.size for leaf in jax.tree.leaves(programs.abstract_state.params))
    out.print(f"{screen.count(number)} parameters in {config.workdir}", highlight=False)
    screen.commands(
        out,
        [
            ("To train", f"python run.py --config={config.workdir}/config.json"),
            ("To generate", f'python run.py generate --workdir={config.workdir} --prompt="..."'),
        ],
    )
    return EXIT_OK


def _take_tokenizer(config: Config, folder: str) -> None:
    """Keeps the tokenizer beside the run, which uses it unless the configuration names another."""
    kept = pathlib.Path(config.workdir).expanduser() / "tokenizer"
    found = copy_tokenizer(pathlib.Path(folder).expanduser(), kept)
    if found and config.data.tokenizer == Config().data.tokenizer:
        config.data.tokenizer = f"hf:{kept}"


def _programs(config: Config) -> Programs:
    """For the devices present; no data is opened. `config` is finalized."""
    tokenizer = make_tokenizer(config.data.tokenizer, config.data.separator)
    sizes = finalize(config, jax.device_count(), tokenizer.vocab_size)
    units = run_units(config, examples=10**6 * config.data.batch_size)  # what no state depends on
    return build_programs(config, make_mesh(sizes), units)


def export_run(config: Config, to: str, dtype: str | None) -> int:
    """Writes the latest checkpoint of the run in `config.workdir` as a Hugging Face model.

    Args:
      dtype: number format of the weights; None for that of the parameters.

    Raises:
      ConfigError: there is no checkpoint, or no architecture of Hugging Face is this model.
    """
    if dtype not in (None, *_DTYPES):
        raise ConfigError("--dtype", dtype, "is not a number format.", f"Use {', '.join(_DTYPES)}.")
    out, folder = screen.make_console(), pathlib.Path(to).expanduser()
    programs = _programs(config)
    text = config.model.text
    text.max_position_embeddings = text.max_position_embeddings or config.data.sequence_length
    checkpoints = Checkpoints(config.workdir, config.checkpoint)
    try:
        step = checkpoints.newest_whole(set_aside=False)
        if step is None:
            raise ConfigError("--workdir", config.workdir, "holds no checkpoint.", "Train first.")
        params = checkpoints.restore_params(programs.abstract_state.params, step)
    finally:
        checkpoints.close()
    number_format = dtype or config.precision.params
    files = write_folder(folder, config.model, programs.model, params, number_format)
    for place in (pathlib.Path(config.workdir).expanduser() / "tokenizer", _tokenizer_of(config)):
        if place is not None and place.is_dir():
            copy_tokenizer(place, folder)
            break
    size = sum(path.stat().st_size for path in files)
    out.print(
        f"Step {step} in {to}: {len(files)} file(s), {screen.size(size)} of {number_format}",
        highlight=False,
    )
    return EXIT_OK


def _tokenizer_of(config: Config) -> pathlib.Path | None:
    kind, _, path = config.data.tokenizer.partition(":")
    return pathlib.Path(path).expanduser() if kind == "hf" else None
