"""A plain MLP on scikit-learn's handwritten digits: 97% and more on held-out ones, in seconds."""

from jaxtpu.config import Config


def get_config() -> Config:
    config = Config()
    config.metrics = ("accuracy",)
    config.model.update({"name": "mlp", "embed": 256, "layers": 2})
    config.model.remat = "none"
    config.model.vision.update({"image_size": 8, "channels": 1})
    config.mesh.update({"emulate": 1, "data": -1, "fsdp": 1})
    config.precision.compute = "float32"
    config.data.update({"source": "digits", "batch_size": 128})
    config.images.shift = 1
    config.label_smoothing = 0.1
    config.optimizer.update({"learning_rate": 2e-3, "average": 0.99, "weight_decay": 0.05})
    config.train.update({"epochs": 60, "log_every": 50})
    return config
