"""TensorFlow as a library for reading data: on the host only, and silent."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from types import ModuleType


def import_tensorflow() -> ModuleType:
    """TensorFlow, which from here on can use no accelerator: those are JAX's alone.

    Call this before anything else imports TensorFlow, or its start-up messages are seen.
    """
    # oneDNN would change nothing for reading data, but announces itself whatever the log level.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    # JAX sets the level to 1 when the user did not, so 1 is nobody's wish; 0 is (for debugging).
    if level != "0":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        with _keras_left_for_later():
            import tensorflow as tf
    finally:
        if level is None:
            os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
        else:
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = level
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf


@contextlib.contextmanager
def _keras_left_for_later() -> Iterator[None]:
    """TensorFlow imports Keras at once, which takes as long as itself; who uses `tf.keras` can.

    It asks for one module only, and takes an `ImportError` for an installation without Keras.
    """
    eager = "keras.src.optimizers"
    if eager in sys.modules:
        yield
        return
    sys.modules[eager] = None
    try:
        yield
    finally:
        sys.modules.pop(eager, None)


def import_tfds() -> ModuleType:
    """TensorFlow Datasets, without progress bars, and without its public cloud bucket.

    The bucket is TFDS's cache of prepared data sets. A host without internet would wait for it.
    Environment variables that keep TensorFlow from asking for cloud credentials are left alone:
    a data directory in a bucket of the user's own needs them.
    """
    import_tensorflow()
    import tensorflow_datasets as tfds

    tfds.core.utils.gcs_utils._is_gcs_disabled = True  # the default of newer versions only
    tfds.disable_progress_bar()
    return tfds


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drops what TFDS says meanwhile: on stdout of a preparation, and in warnings of itself."""
    from absl import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
