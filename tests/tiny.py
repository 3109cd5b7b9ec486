"""Tiny runs for tests: a small model with awkward sizes, fixed batches, any mesh."""

import jax
import numpy as np

from jaxtpu.config import Config, finalize, run_units
from jaxtpu.mesh import make_mesh
from jaxtpu.train.programs import Programs, build_programs

BATCH, LENGTH, VOCABULARY = 16, 24, 257


def tiny_config(**sections) -> Config:
    """A float32 model with 3 key heads and 6 query heads, which no power of two divides."""
    config = Config()
    config.model.update(
        {"embed": 48, "layers": 3, "heads": 6, "kv_heads": 3, "head_dim": 8, "mlp": 96}
    )
    config.precision.compute = "float32"
    config.data.update({"batch_size": BATCH, "sequence_length": LENGTH})
    config.train.steps = 20
    config.update(sections)
    return config


def programs_on(
    sizes: dict[str, int], devices: int = 8, vocabulary: int = VOCABULARY, with_config=False,
    **sections,
) -> Programs:  # fmt: skip
    """Programs of the tiny model on a mesh of `devices` emulated devices; also its config."""
    config = tiny_config(**sections)
    config.mesh.update({"data": 1, "fsdp": 1} | sizes)
    sizes = finalize(config, devices, vocabulary)
    mesh = make_mesh(sizes, jax.devices()[:devices])
    programs = build_programs(config, mesh, run_units(config, examples=1000))
    return (programs, config) if with_config else programs


def fixed_batch(seed: int = 0, padding: bool = True) -> dict[str, np.ndarray]:
    """Tokens with a pattern to learn, two documents a row, and padding of uneven length."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 64, (BATCH, 1))
    tokens = (start + np.arange(LENGTH + 1) * random.integers(1, 4, (BATCH, 1))) % 250
    lengths = random.integers(4, LENGTH + 1, (BATCH, 1)) if padding else np.full((BATCH, 1), LENGTH)
    columns = np.arange(LENGTH)[None]
    real = columns < lengths
    split = LENGTH // 3
    return {
        "inputs": (tokens[:, :-1] * real).astype(np.int32),
        "targets": (tokens[:, 1:] * real).astype(np.int32),
        "segment_ids": (np.where(columns < split, 1, 2) * real).astype(np.int32),
        "positions": (np.where(columns < split, columns, columns - split) * real).astype(np.int32),
        "weights": real.astype(np.float32),
    }


def put(programs: Programs, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """`batch` on the devices, divided as the step expects."""
    return jax.device_put(batch, {k: v.sharding for k, v in programs.abstract_batch.items()})


def run_steps(programs: Programs, batches: list[dict[str, np.ndarray]]):
    """(final state, metrics of each step as floats), from the initial state."""
    state, history = programs.init(), []
    for batch in batches:
        state, metrics = programs.train_step(state, put(programs, batch))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history
