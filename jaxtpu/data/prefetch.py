"""Work done ahead of its consumer: `tf.data` on the host, then a thread that fills the devices."""

import atexit
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxtpu.data.quiet_tensorflow import import_tensorflow
from jaxtpu.errors import UserError

_PARALLEL_CALLS = 2  # host batches made at once; gathering tokens is far faster than a step
_CLOSE_SECONDS = 10.0


class Prefetcher:
    """Iterates over `to_device(batch)` of batches made on the host, keeping some ready ahead.

    Args:
      batches: () -> an iterator of batches on the host, used by one thread: `host_batches`, another
        `tf.data` pipeline (import TensorFlow before: in the thread an error is told late), or any.
      to_device: copies them to the devices; called from one thread.
      ready: how many results are kept ready, at least 1.
    """

    def __init__(
        self,
        batches: Callable[[], Iterator[Any]],
        to_device: Callable[[Any], Any],
        ready: int,
    ):
        self.wait_seconds = 0.0
        self._ready: queue.Queue = queue.Queue(maxsize=ready)
        self._stop = threading.Event()
        # The thread is given no reference to this object, or it could never be collected.
        thread = threading.Thread(
            target=_produce,
            args=(batches, to_device, self._ready, self._stop),
            name="jaxtpu-prefetch",
            daemon=True,
        )
        self._close = weakref.finalize(self, _shut_down, thread, self._ready, self._stop)
        # At exit, before JAX and TensorFlow are taken down: they registered their part earlier.
        atexit.register(self._close)
        thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next result, waiting for it where need be.

        Raises:
          StopIteration: there is none left.
          UserError: making it failed so.
          RuntimeError: making it failed, with the failure as its cause; or this is closed.
        """
        start = time.perf_counter()
        result = self._wait()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(result, _Failure):
            self.close()
            self._ready.put(result)  # for the next call
            error = result.error
            if isinstance(error, (UserError, StopIteration)):
                raise error
            message = f"Reading training data failed: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error
        return result

    def _wait(self) -> Any:
        while True:
            try:
                return self._ready.get(timeout=0.5)
            except queue.Empty:
                if self._stop.is_set():
                    raise RuntimeError("The data loader is closed.") from None

    def close(self) -> None:
        """Stops the thread and drops what is ready. A second call does nothing."""
        atexit.unregister(self._close)
        self._close()


class Batches:
    """An endless iterator of (batch, position after it), with batches made ahead in a thread.

    Use it as a context manager, or call `close()`. Not safe for use by several threads.

    Args:
      prefetcher: of the batches on the devices.
      position_after: how many batches were taken -> the position that a run would go on from.
    """

    def __init__(self, prefetcher: Prefetcher, position_after: Callable[[int], Any]):
        self._prefetcher, self._position_after, self._count = prefetcher, position_after, 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[Any, Any]:
        """The next batch, and the position from which a run would go on after it.

        Raises:
          RuntimeError: reading failed, with the failure as its cause; or this is closed.
        """
        batch = next(self._prefetcher)
        self._count += 1
        return batch, self._position_after(self._count)

    @property
    def wait_seconds(self) -> float:
        """Seconds that the consumer has waited for batches so far."""
        return self._prefetcher.wait_seconds

    def close(self) -> None:
        """Stops the thread and frees the batches made ahead. A second call does nothing."""
        self._prefetcher.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class _Failure:
    def __init__(self, error: BaseException):
        self.error = error


def _produce(batches, to_device, ready: queue.Queue, stop: threading.Event) -> None:
    """The thread: puts results in `ready` until told to stop, or one failure, or the end."""
    try:
        for batch in batches():
            if stop.is_set() or not _put(ready, to_device(batch), stop):
                return
        _put(ready, _Failure(StopIteration()), stop)
    except BaseException as error:
        _put(ready, _Failure(error), stop)


def host_batches(
    host_batch: Callable[[int], dict[str, np.ndarray]], dtypes: dict[str, np.dtype]
) -> Iterator[dict[str, np.ndarray]]:
    """`host_batch(0)`, `host_batch(1)`, ..., made by `tf.data` a few at a time, in order.

    Args:
      host_batch: the arrays of batch i; called from several threads.
      dtypes: of those arrays, by name.
    """
    tf = import_tensorflow()
    failures: list[BaseException] = []

    def arrays(number: np.ndarray) -> list[np.ndarray]:
        try:
            batch = host_batch(int(number))
            return [batch[name] for name in dtypes]
        except BaseException as error:
            failures.append(error)
            raise

    types = [tf.as_dtype(dtype) for dtype in dtypes.values()]
    dataset = tf.data.Dataset.range(sys.maxsize).map(
        lambda number: tf.numpy_function(arrays, [number], types),
        num_parallel_calls=_PARALLEL_CALLS,
        deterministic=True,
    )
    batches = dataset.prefetch(_PARALLEL_CALLS).as_numpy_iterator()
    while True:
        try:
            values = next(batches)
        except Exception as error:
            # TensorFlow makes an error of its own out of one of `arrays`, without the cause.
            raise (failures[0] if failures else error) from None
        yield dict(zip(dtypes, values, strict=True))


def _put(ready: queue.Queue, item: Any, stop: threading.Event) -> bool:
    """Whether `item` went into the queue, rather than a stop being asked for."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def _shut_down(thread: threading.Thread, ready: queue.Queue, stop: threading.Event) -> None:
    """Ends the thread; where it is stuck, for example in a dead file system, not for ever."""
    stop.set()
    if thread is not threading.current_thread():  # where the garbage collector runs in it
        thread.join(_CLOSE_SECONDS)
    with ready.mutex:
        ready.queue.clear()
