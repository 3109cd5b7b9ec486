"""A run of seconds, for tests of the whole trainer."""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.model.update({"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64})
    config.model.remat = "none"
    config.mesh.update({"data": 2, "fsdp": -1, "tensor": 2})
    config.data.update({"batch_size": 8, "sequence_length": 32})
    config.train.update({"steps": 20, "log_every": 1, "evaluate_every": 0, "evaluate_batches": 2})
    config.checkpoint.every = 0
    return config
