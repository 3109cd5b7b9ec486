"""What a batch is, from shapes alone: a step can be compiled before any data is read."""

import jax

from jaxtpu.config.vision import VisionConfig

_DTYPES = {
    "inputs": "int32",
    "targets": "int32",
    "segment_ids": "int32",
    "positions": "int32",
    "weights": "float32",
}


def batch_spec(batch_size: int, sequence_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of one global batch, each [batch_size, sequence_length], without sharding.

    - inputs (int32): token ids that the model reads.
    - targets (int32): token ids that it predicts; the token after `inputs` in the stream.
    - segment_ids (int32): 1, 2, ... for the documents of a row, in order; 0 for padding.
    - positions (int32): position in the segment, from 0 at the segment's first token in the row.
    - weights (float32): 1 for a target that counts, 0 for padding.
    """
    shape = (batch_size, sequence_length)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in _DTYPES.items()}


def image_batch_spec(
    batch_size: int, vision: VisionConfig, *, soft_labels: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of one global batch of images, without sharding.

    - images (float32): [batch_size, image_size, image_size, channels].
    - labels: class of each image, int32 [batch_size]; with `soft_labels`, of mixed images, the
      probability of each class, float32 [batch_size, classes].
    - weights (float32): [batch_size], 1 for an image that counts, 0 for padding.
    """
    size = vision.image_size
    labels = ((batch_size, vision.classes), "float32") if soft_labels else ((batch_size,), "int32")
    return {
        "images": jax.ShapeDtypeStruct((batch_size, size, size, vision.channels), "float32"),
        "labels": jax.ShapeDtypeStruct(*labels),
        "weights": jax.ShapeDtypeStruct((batch_size,), "float32"),
    }
