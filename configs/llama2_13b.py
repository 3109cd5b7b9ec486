"""Llama-2-13B shapes (arXiv:2307.09288), sequence 2048, all parameters trained on a v3-8.

With 8 GiB a core there is room for little beside bfloat16 parameters and their gradients: the
optimizer is Adafactor, whose second moment is factored, and parameters are rounded stochastically.
`mesh.tensor` is 2 because it divides what each layer keeps, its tokens between layers, and what is
gathered of its weights.
"""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.model.vocab_size = 32000
    config.model.embed = 5120
    config.model.layers = 40
    config.model.heads = 40
    config.model.mlp = 13824
    config.model.norm_epsilon = 1e-5
    config.mesh.tensor = 2
    config.precision.params = "bfloat16"
    config.data.batch_size = 8
    config.data.sequence_length = 2048
    config.optimizer.update({"name": "adafactor", "rounding": "stochastic", "learning_rate": 3e-4})
    config.train.steps = 10_000
    return config
