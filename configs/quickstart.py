"""A byte-level language model of Python code, trained in minutes on a laptop.

The corpus is the standard library of the running interpreter. Without an accelerator this runs on
8 emulated CPU devices, as data=2, fsdp=2, tensor=2; on TPUs the fsdp axis takes the devices left.
"""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.metrics = ("accuracy",)
    config.model.embed = 128
    config.model.layers = 4
    config.model.heads = 4
    config.model.kv_heads = 2
    config.model.mlp = 384
    config.model.remat = "none"  # small enough to keep every activation
    config.mesh.data = 2
    config.mesh.fsdp = -1
    config.mesh.tensor = 2
    config.data.batch_size = 16
    config.data.sequence_length = 256
    config.optimizer.learning_rate = 3e-3
    config.train.steps = 300
    config.train.evaluate_every = "50%"
    config.checkpoint.every = "25%"
    return config
