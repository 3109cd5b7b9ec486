"""The profile hook: a trace of a few steps, for TensorBoard's profiler."""

import jax

from jaxtpu.train.loop import Progress


class ProfileHook:
    """Traces `steps` steps after step `start` into `directory`."""

    def __init__(self, directory: str, start: int, steps: int):
        self._directory, self._start, self._stop = directory, start, start + steps
        self._tracing = False

    def __call__(self, progress: Progress) -> None:
        ending = progress.last or progress.stopping
        if progress.step == self._start and not ending:
            progress.drain()
            jax.profiler.start_trace(self._directory)
            self._tracing = True
        elif self._tracing and (progress.step >= self._stop or ending):
            progress.drain()
            jax.profiler.stop_trace()
            self._tracing = False
