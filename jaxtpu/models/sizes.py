"""Sizes that are padded to what devices and meshes divide."""

from jaxtpu.config import ModelConfig


def padded_vocabulary(config: ModelConfig) -> int:
    """The vocabulary rounded up to `vocab_multiple`."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def padded_mlp(config: ModelConfig) -> int:
    """Hidden features of the MLP, rounded up to `mlp_multiple`."""
    return -(-config.mlp // config.mlp_multiple) * config.mlp_multiple
