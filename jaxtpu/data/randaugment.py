"""The operations of RandAugment (arXiv:1909.13719), on `tf.image` and TensorFlow's image kernels.

Shapes: S the side of an image; C its channels, 1 or 3. Images are uint8.
"""

import math
from typing import Any

from jaxtpu.data.quiet_tensorflow import import_tensorflow

_GREY = 125  # what is moved in from outside of the image


def randaugment(image_SSC: Any, draw: Any, level: float):
    """One operation, chosen by `draw` from all, each as likely.

    Args:
      draw: key of the random numbers, int64 [2].
      level: strength, 0 to 1.

    Returns:
      uint8 [S, S, C].
    """
    tf = import_tensorflow()
    chosen, negative = tf.unstack(
        tf.random.stateless_uniform([2], draw, 0, 2**30, tf.int32, alg="philox")
    )
    sign = tf.where(negative % 2 == 0, 1.0, -1.0)
    branches = [lambda op=op: op(image_SSC, level, sign) for op in OPERATIONS.values()]
    image_SSC_out = tf.switch_case(chosen % len(branches), branches)
    return tf.ensure_shape(image_SSC_out, image_SSC.shape)


def _blend(other: Any, image: Any, factor: Any):
    """`image` where the factor is 1, `other` where it is 0; beyond 1, away from `other`."""
    tf = import_tensorflow()
    other, image = tf.cast(other, tf.float32), tf.cast(image, tf.float32)
    return tf.saturate_cast(tf.round(other + factor * (image - other)), tf.uint8)


def _grey(image: Any):
    tf = import_tensorflow()
    return image if image.shape[-1] == 1 else tf.image.rgb_to_grayscale(image)


def _identity(image, level, sign):
    return image


def _autocontrast(image, level, sign):
    """The darkest value of each channel becomes 0, the brightest 255."""
    tf = import_tensorflow()
    S, _, C = image.shape
    # As rows of numbers, as TensorFlow is slow at what differs along a short innermost axis.
    rows = tf.cast(tf.reshape(image, [S, S * C]), tf.float32)
    low = tf.reduce_min(tf.reshape(tf.reduce_min(rows, 0), [S, C]), 0)
    high = tf.reduce_max(tf.reshape(tf.reduce_max(rows, 0), [S, C]), 0)
    flat = high == low  # such a channel stays
    low, width = tf.where(flat, 0.0, low), tf.where(flat, 255.0, high - low)
    stretched = (rows - tf.tile(low, [S])) * 255 / tf.tile(width, [S])
    return tf.reshape(tf.saturate_cast(tf.round(stretched), tf.uint8), image.shape)


def _equalize(image, level, sign):
    """Every value of a channel becomes as frequent as the others, as far as that can be."""
    tf = import_tensorflow()
    S, _, C = image.shape
    values_CN = tf.cast(tf.transpose(tf.reshape(image, [S * S, C])), tf.int32)

    def table(values_N):
        counts = tf.math.bincount(values_N, minlength=256, maxlength=256)
        seen = tf.boolean_mask(counts, counts > 0)
        step = (tf.reduce_sum(counts) - seen[-1]) // 255
        spread = (tf.cumsum(counts, exclusive=True) + step // 2) // tf.maximum(step, 1)
        table = tf.where(step > 0, tf.clip_by_value(spread, 0, 255), tf.range(256))
        return tf.cast(table, tf.uint8)

    tables = tf.concat([table(values_CN[c]) for c in range(C)], 0)
    equalized_CN = tf.gather(tables, values_CN + 256 * tf.range(C)[:, None])
    return tf.reshape(tf.transpose(equalized_CN), image.shape)


def _solarize(image, level, sign):
    tf = import_tensorflow()
    threshold = max(0, min(255, round(255 * (1 - level))))
    inverted = tf.cast(image >= threshold, tf.uint8) * 255
    return tf.bitwise.bitwise_xor(image, inverted)


def _posterize(image, level, sign):
    tf = import_tensorflow()
    dropped = round(4 * level)  # bits
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, dropped), dropped)


def _color(image, level, sign):
    return _blend(_grey(image), image, 1 + sign * 0.9 * level)


def _brightness(image, level, sign):
    return _blend(0, image, 1 + sign * 0.9 * level)


def _contrast(image, level, sign):
    tf = import_tensorflow()
    mean = tf.reduce_mean(tf.cast(_grey(image), tf.float32))
    return _blend(mean, image, 1 + sign * 0.9 * level)


def _sharpness(image, level, sign):
    """Blends with the image smoothed by [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13."""
    tf = import_tensorflow()
    values = tf.cast(image, tf.float32)
    padded = tf.pad(values, [[1, 1], [1, 1], [0, 0]], "SYMMETRIC")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    around = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
    return _blend((around + 4 * values) / 13, image, 1 + sign * 0.9 * level)


def _moved(image, matrix):
    """The image whose pixel (x, y) is that at `matrix` (x, y, 1), its first two rows given."""
    tf = import_tensorflow()
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack([*map(lambda v: tf.cast(v, tf.float32), matrix), 0.0, 0.0])[None],
        output_shape=tf.shape(image)[:2],
        fill_value=float(_GREY),
        interpolation="BILINEAR",
        fill_mode="CONSTANT",
    )
    return moved[0]


def _rotate(image, level, sign):
    """By up to 30 degrees, about the middle."""
    tf = import_tensorflow()
    angle = sign * (level * math.pi / 6)
    middle = (image.shape[0] - 1) / 2
    cos, sin = tf.cos(angle), tf.sin(angle)
    x = middle * (1 - cos + sin)
    y = middle * (1 - cos - sin)
    return _moved(image, (cos, -sin, x, sin, cos, y))


def _shear_x(image, level, sign):
    return _moved(image, (1.0, sign * 0.3 * level, 0.0, 0.0, 1.0, 0.0))


def _shear_y(image, level, sign):
    return _moved(image, (1.0, 0.0, 0.0, sign * 0.3 * level, 1.0, 0.0))


def _translate(image, pixels: Any, axis: int):
    """By whole pixels: the image whose pixel x is that at `x + pixels`."""
    tf = import_tensorflow()
    by = tf.cast(tf.round(pixels), tf.int32)
    around = [[0, 0], [0, 0], [0, 0]]
    around[axis] = [tf.maximum(-by, 0), tf.maximum(by, 0)]
    padded = tf.pad(image, around, constant_values=tf.constant(_GREY, image.dtype))
    begin = [0, 0, 0]
    begin[axis] = tf.maximum(by, 0)
    return tf.slice(padded, begin, image.shape)


def _translate_x(image, level, sign):
    return _translate(image, sign * (level * 0.3 * image.shape[1]), 1)


def _translate_y(image, level, sign):
    return _translate(image, sign * (level * 0.3 * image.shape[0]), 0)


# (image, level 0 to 1, a sign of the direction) -> image.
OPERATIONS = {
    "identity": _identity,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": _solarize,
    "color": _color,
    "posterize": _posterize,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
}
