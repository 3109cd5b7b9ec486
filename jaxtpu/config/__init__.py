"""The configuration: schema, files, overrides, checks."""

from jaxtpu.config.duration import Duration, RunUnits, to_steps
from jaxtpu.config.load import leaves, load, split_arguments
from jaxtpu.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    GuardConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ShardingConfig,
    TrainConfig,
    WatchdogConfig,
)
from jaxtpu.config.validate import finalize, mesh_sizes, run_units

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Duration",
    "GuardConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RunUnits",
    "ShardingConfig",
    "TrainConfig",
    "WatchdogConfig",
    "finalize",
    "leaves",
    "load",
    "mesh_sizes",
    "run_units",
    "split_arguments",
    "to_steps",
]
