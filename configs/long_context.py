"""The model of lm_1b.py on sequences of 32768 tokens: attention must be a kernel."""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.model.vocab_size = 32000
    config.model.embed = 2048
    config.model.layers = 24
    config.model.heads = 16
    config.model.mlp = 5632
    config.model.rope_theta = 500_000.0
    config.model.remat_group = 4
    config.data.batch_size = 8
    config.data.sequence_length = 32768
    config.optimizer.learning_rate = 3e-4
    config.train.steps = 10_000
    return config
