"""What is done to an image, as `tf.data` maps: decode, crop, shift, flip, RandAugment.

Every draw is made from the seed and the number of the example in training alone, so an image is
altered in the same way whichever process reads it, and whether the run was resumed before it.

Shapes: X, Y height and width as stored; S the side in the batch; C channels.
"""

from typing import Any

from jaxtpu.config.vision import ImagesConfig
from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.data.randaugment import randaugment

_RATIOS = (3 / 4, 4 / 3)  # of the sides of a random-resized crop


def training_image(
    data: Any, number: Any, seed: int, config: ImagesConfig, size: int, channels: int
):
    """The image of example `number`, altered.

    Args:
      data: bytes of an image file, a string tensor.
      number: of the example since the start of training, an int64 tensor.

    Returns:
      [S, S, C], 0 to 255: float32, or uint8 after RandAugment.
    """
    tf = import_tensorflow()
    if config.crop_area < 1:
        image_SSC = _random_crop(data, _draw(seed, number, 0), config.crop_area, size, channels)
    else:
        image_SSC = _middle(data, size, channels)
    if config.shift:
        by = config.shift
        mode = "REFLECT" if by < size else "CONSTANT"
        padded = tf.pad(image_SSC, [[by, by], [by, by], [0, 0]], mode)
        offsets = tf.random.stateless_uniform(
            [2], _draw(seed, number, 1), 0, 2 * by + 1, tf.int32, alg="philox"
        )
        image_SSC = tf.slice(padded, [offsets[0], offsets[1], 0], [size, size, channels])
    if config.flip:
        half = tf.random.stateless_uniform([], _draw(seed, number, 2), alg="philox") < 0.5
        image_SSC = tf.cond(half, lambda: tf.reverse(image_SSC, [1]), lambda: image_SSC)
    if config.randaugment:
        whole = tf.saturate_cast(tf.round(image_SSC), tf.uint8)
        level = config.magnitude / 10
        for which in range(config.randaugment):
            whole = randaugment(whole, _draw(seed, number, 3 + which), level)
        image_SSC = whole
    return tf.ensure_shape(image_SSC, [size, size, channels])


def evaluation_image(data: Any, size: int, channels: int):
    """The middle square, resized, float32 [S, S, C], 0 to 255."""
    tf = import_tensorflow()
    return tf.ensure_shape(_middle(data, size, channels), [size, size, channels])


def decoded(data: Any, channels: int):
    """The first picture of an image file, uint8 [X, Y, C]."""
    tf = import_tensorflow()
    return tf.io.decode_image(data, channels, expand_animations=False)


def _draw(seed: int, number: Any, use: int):
    """The key of one draw: another for every use, example and seed."""
    tf = import_tensorflow()
    return tf.stack([tf.constant(seed * 64 + use, tf.int64), number])


def _middle(data: Any, size: int, channels: int):
    tf = import_tensorflow()
    image_XYC = decoded(data, channels)
    shape = tf.shape(image_XYC)
    side = tf.minimum(shape[0], shape[1])
    image_XYC = tf.slice(
        image_XYC, [(shape[0] - side) // 2, (shape[1] - side) // 2, 0], [side, side, channels]
    )
    return _resized(image_XYC, size, channels)


def _random_crop(data: Any, draw: Any, area: float, size: int, channels: int):
    """A random-resized crop; of a JPEG file, only the crop is decoded."""
    tf = import_tensorflow()

    def window(shape: Any):
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape, tf.constant([[[0.0, 0.0, 1.0, 1.0]]]), draw, min_object_covered=0.0,
            aspect_ratio_range=_RATIOS, area_range=(area, 1.0), max_attempts=10,
        )  # fmt: skip
        return begin, extent

    def of_jpeg():
        begin, extent = window(tf.io.extract_jpeg_shape(data))
        box = tf.concat([begin[:2], extent[:2]], 0)
        return tf.io.decode_and_crop_jpeg(data, box, channels, dct_method="INTEGER_FAST")

    def of_any():
        image_XYC = decoded(data, channels)
        begin, extent = window(tf.shape(image_XYC))
        return tf.slice(image_XYC, begin, tf.concat([extent[:2], [channels]], 0))

    crop_XYC = tf.cond(tf.io.is_jpeg(data), of_jpeg, of_any)
    # Down to half its size no pixel falls between those that are read, so none needs averaging,
    # which takes five times as long.
    return tf.cond(
        tf.reduce_max(tf.shape(crop_XYC)[:2]) <= 2 * size,
        lambda: _resized(crop_XYC, size, channels, averaged=False),
        lambda: _resized(crop_XYC, size, channels),
    )


def _resized(image_XYC: Any, size: int, channels: int, *, averaged: bool = True):
    """float32 [S, S, C], from 0 to 255.

    Args:
      averaged: whether every pixel counts alike where the image is made smaller.
    """
    tf = import_tensorflow()
    image_XYC = tf.ensure_shape(image_XYC, [None, None, channels])
    return tf.image.resize(image_XYC, [size, size], antialias=averaged)
