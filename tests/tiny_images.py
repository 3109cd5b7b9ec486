"""Tiny runs of vision models for tests: fixed images, any mesh."""

import jax
import numpy as np

from jaxtpu.config import Config, finalize, run_units
from jaxtpu.mesh import make_mesh
from jaxtpu.train.programs import Programs, build_programs

BATCH, SIZE, CLASSES = 16, 16, 10


def image_config(name: str, **sections) -> Config:
    config = Config()
    config.model.update({"name": name, "embed": 64, "layers": 2, "heads": 4, "mlp": 96})
    config.model.vision.update(
        {
            "image_size": SIZE,
            "classes": CLASSES,
            "stages": (1, 1),
            "width": 8,
            "groups": 4,
            "token_mlp": 24,
        }
    )
    config.precision.compute = "float32"
    config.data.batch_size = BATCH
    config.train.steps = 20
    config.update(sections)
    return config


def image_programs(name: str, sizes: dict[str, int], devices: int = 8, **sections) -> Programs:
    """Programs of a tiny model on a mesh of `devices` emulated devices."""
    config = image_config(name, **sections)
    config.mesh.update({"data": 1, "fsdp": 1} | sizes)
    sizes = finalize(config, devices, CLASSES)
    mesh = make_mesh(sizes, jax.devices()[:devices])
    return build_programs(config, mesh, run_units(config, examples=1000))


def image_batch(seed: int = 0, padding: int = 3, soft: bool = False) -> dict[str, np.ndarray]:
    """Random images, of which the last `padding` do not count."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, BATCH).astype(np.int32)
    if soft:
        labels = random.dirichlet(np.ones(CLASSES), BATCH).astype(np.float32)
    weights = np.ones(BATCH, np.float32)
    weights[BATCH - padding :] = 0
    images = random.normal(size=(BATCH, SIZE, SIZE, 3)).astype(np.float32)
    return {"images": images, "labels": labels, "weights": weights}
