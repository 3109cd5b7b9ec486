"""A 1.4 billion parameter language model: embedding 2048, 24 layers, untied vocabulary of 32000."""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.model.vocab_size = 32000
    config.model.embed = 2048
    config.model.layers = 24
    config.model.heads = 16
    config.model.mlp = 5632
    config.data.batch_size = 32
    config.data.sequence_length = 2048
    config.optimizer.learning_rate = 3e-4
    config.train.steps = 10_000
    return config
