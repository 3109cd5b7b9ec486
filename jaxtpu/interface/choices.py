"""Mesh and optimizer of the Python interface, from what is written for them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtpu import environment
from jaxtpu.config import MeshConfig, OptimizerConfig, RunUnits
from jaxtpu.config.validate import MESH_AXES, mesh_sizes
from jaxtpu.errors import ConfigError, nearest
from jaxtpu.optimizer import Optimizer, make_optimizer

_OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "adafactor")


def sizes_of(mesh: str | dict[str, int]) -> dict[str, int]:
    """Devices along each axis, from "data=2,fsdp=4"; axes that are not named have one."""
    pairs = mesh.items() if isinstance(mesh, dict) else [
        (part.partition("=")[0].strip(), part.partition("=")[2].strip())
        for part in mesh.split(",") if part.strip()
    ]  # fmt: skip
    config = MeshConfig(data=1, fsdp=1)
    for axis, size in pairs:
        if axis not in MESH_AXES:
            raise ConfigError("mesh", mesh, f"{axis!r} is no axis.", nearest(axis, MESH_AXES))
        try:
            setattr(config, axis, int(size))
        except ValueError:
            raise ConfigError(
                "mesh", mesh, f"{axis} needs a number of devices.", f"For example: {axis}=2"
            ) from None
    environment.prepare(config.emulate)  # what is set stays; a backend that runs, too
    try:
        return mesh_sizes(config, jax.device_count())
    except ConfigError as error:
        hint = error.suggestion
        if jax.default_backend() == "cpu":
            hint += (
                " Or call jaxtpu.emulate(N), for N devices on the CPU, before anything uses JAX."
            )
        raise ConfigError("mesh", mesh, error.problem, hint) from None


def optimizer_config(given: Any, learning_rate: float) -> Any:
    if not isinstance(given, str):
        if isinstance(given, (OptimizerConfig, optax.GradientTransformation)):
            return given
        raise ConfigError(
            "optimizer",
            given,
            "is no optimizer.",
            f"Use one of {', '.join(_OPTIMIZERS)}, or optax.",
        )
    if given not in _OPTIMIZERS:
        raise ConfigError("optimizer", given, "is not a known name.", nearest(given, _OPTIMIZERS))
    return OptimizerConfig(
        name=given, learning_rate=learning_rate, schedule="constant", warmup=0, clip_norm=0.0,
        beta1=0.0 if given == "sgd" else 0.9, beta2=0.999, epsilon=1e-7, no_decay=(),
        weight_decay=0.004 if given == "adamw" else 0.0,
    )  # fmt: skip


def made_optimizer(given: Any, abstract_params: Any, divided: dict[str, int]) -> Optimizer:
    if isinstance(given, OptimizerConfig):
        return make_optimizer(given, RunUnits(1, None, 1, 1), abstract_params, divided=divided)

    def update(gradient, examples, state, params, step, verdict=None):
        del examples, step, verdict  # a Trainer's step has no guard
        updates, state = given.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    nowhere = lambda state: jax.tree.map(lambda _: False, state)  # noqa: E731
    return Optimizer(given.init, update, lambda step: jnp.nan, nowhere)
