"""Llama-2-7B shapes (arXiv:2307.09288), sequence 2048, on the bundled byte-level corpus.

`python run.py plan --config=configs/llama2_7b.py --slice=v3-32` says how it fits. Two variants train
all parameters on a v3-8, with 8 GiB a core:

- `configs/llama2_7b.py:host`: AdamW in float32; parameters on the devices are bfloat16, their
  float32 originals and the moments are on the host.
- `configs/llama2_7b.py:adafactor`: nothing on the host; bfloat16 parameters, stochastically rounded.
"""

from jaxtpu.config import Config


def get_config(variant: str = "") -> Config:
    config = Config()
    config.model.vocab_size = 32000
    config.model.embed = 4096
    config.model.layers = 32
    config.model.heads = 32
    config.model.mlp = 11008
    config.model.norm_epsilon = 1e-5
    config.data.batch_size = 32
    config.data.sequence_length = 2048
    config.optimizer.learning_rate = 3e-4
    config.train.steps = 10_000
    if variant and variant not in ("host", "adafactor"):
        raise ValueError(f"there is no variant {variant!r}: use host or adafactor")
    if variant:
        config.precision.params = "bfloat16"
        config.data.batch_size = 8
        config.optimizer.update(
            {
                "host": {"placement": "host", "rounding": "master"},
                "adafactor": {"name": "adafactor", "rounding": "stochastic"},
            }[variant]
        )
    return config
