"""The quickstart's model for 2,000 steps: it beats `xz -9` on the files that it has not seen.

`python -m tests.benchmarks.xz` compares the two, in bits per byte; tests/benchmarks/README.md has
the recorded curve. Muon learns more from a step than AdamW does, and takes as long. Without an
accelerator it runs on one emulated device, which two cores serve quicker than eight.
"""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.metrics = ("accuracy",)
    config.model.update({"embed": 128, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 384})
    config.model.remat = "none"
    config.mesh.emulate = 1
    config.data.update({"batch_size": 16, "sequence_length": 256})
    config.optimizer.update({"name": "muon", "learning_rate": 3e-3, "final_fraction": 0.02})
    config.train.update({"steps": 2000, "log_every": 50, "evaluate_every": "25%"})
    config.checkpoint.every = "10%"
    return config
