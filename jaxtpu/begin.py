"""The state that a run begins with: restored, new, or new with parameters of another run."""

from typing import Any

import jax

from jaxtpu.checkpoint import Checkpoints
from jaxtpu.checkpoint.structure import check_structure, structure_of
from jaxtpu.config import CheckpointConfig
from jaxtpu.data.order import Position
from jaxtpu.errors import ConfigError
from jaxtpu.interop.read import initial_state
from jaxtpu.paths import flatten, map_with_path, matcher
from jaxtpu.setup import Setup


def new_state(setup: Setup) -> Any:
    """The state before the first step: of the seed alone, of `weights`, or with the parameters of
    `checkpoint.init_from` that `checkpoint.init_params` names."""
    state = jax.block_until_ready(initial_state(setup.config, setup.programs))
    if not setup.config.checkpoint.init_from:
        return state
    return with_loaded(setup, state)


def restored_state(setup: Setup, checkpoints: Checkpoints, step: int) -> tuple[Any, Position]:
    """(state, data position) of a step."""
    state, position = checkpoints.restore(setup.programs.abstract_state, step)
    return state, Position.from_json(position)


def with_loaded(setup: Setup, state: Any) -> Any:
    """`state` with parameters of another run's newest whole checkpoint, in the dtypes and on the
    mesh of this one.

    Raises:
      ConfigError: there is no checkpoint; a pattern matches no parameter.
      MismatchError: parameters that are wanted are missing there, or of another shape.
    """
    config = setup.config.checkpoint
    source = open_source(config)
    try:
        step = source.newest_whole(set_aside=False)
        if step is None:
            raise ConfigError(
                "checkpoint.init_from", config.init_from, "holds no whole checkpoint.",
                "For example: runs/quickstart",
            )  # fmt: skip
        abstract = flatten(setup.programs.abstract_state.params)
        chosen = matcher("checkpoint.init_params", config.init_params, abstract)
        wanted = {path: leaf for path, leaf in abstract.items() if chosen(path)}
        found = {n: leaf for n, leaf in source.params_structure(step).items() if n in wanted}
        where = f"the checkpoint of step {step} in {source.directory}"
        check_structure(found, structure_of(wanted), where)
        loaded = source.restore_some(wanted, step)
        originals = _originals(flatten(setup.programs.abstract_state.opt_state), wanted)
        masters = source.restore_some(originals, step) if originals else {}
    finally:
        source.close()
    params = map_with_path(lambda path, leaf: loaded.get(path, leaf), state.params)
    kept = map_with_path(lambda path, leaf: masters.get(_of(path), leaf), state.opt_state)
    return state.replace(params=params, opt_state=kept)


def _of(path: str) -> str | None:
    """The parameter that a leaf of the optimizer's state is the float32 original of, if it is."""
    before, found, parameter = path.partition("master/")
    return parameter if found and (not before or before.endswith("/")) else None


def _originals(opt_state: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf for path, leaf in opt_state.items() if (name := _of(path)) in wanted}


def open_source(config: CheckpointConfig) -> Checkpoints:
    """The checkpoints that `init_from` names: a run's folder, or that of its checkpoints."""
    source = Checkpoints(config.init_from, CheckpointConfig())
    if source.steps:
        return source
    source.close()
    alone = CheckpointConfig()
    alone.directory = config.init_from
    return Checkpoints(config.init_from, alone)
