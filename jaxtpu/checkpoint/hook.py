"""The save hook: when the loop saves, and what happens when a save fails."""

import time
from collections.abc import Callable

from jaxtpu.checkpoint.store import Checkpoints, SaveError
from jaxtpu.processes import Agreement
from jaxtpu.train.loop import Progress

_FIRST_RETRY, _LAST_RETRY = 10.0, 600.0  # seconds; doubled from one to the next
_FINAL_ATTEMPTS = 4
_PATIENCE = 60.0  # seconds that a save waits for the one before it, where a process is alone


class SaveHook:
    """Saves every `interval` steps, every `minutes`, and at the end; a failure is told and tried
    again, and ends the run only where it is the last save's.

    Args:
      checkpoints: where to.
      interval: steps; 0 for only at the end.
      minutes: 0 for none.
      save: (progress) -> None, starts a save; raises `SaveError`.
      tell: is given a line for people.
      agreement: by which all processes save at the same step.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        interval: int,
        minutes: float,
        save: Callable[[Progress], None],
        tell: Callable[[str], None],
        agreement: Agreement,
    ):
        self._checkpoints, self._interval, self._seconds = checkpoints, interval, 60 * minutes
        self._save, self._tell, self._agreement = save, tell, agreement
        self._last_saved = time.monotonic()
        self._retry_at: float | None = None
        self._backoff = _FIRST_RETRY

    def __call__(self, progress: Progress) -> None:
        self._look_at_last()
        if progress.last or progress.stopping:
            self._save_finally(progress)
            return
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self._agreement.want("save")
        if self._seconds and now - self._last_saved >= self._seconds:
            self._last_saved = now
            self._agreement.want("save")
        at_interval = self._interval and progress.step % self._interval == 0
        if "save" in progress.agreed or at_interval:
            self._attempt(progress)

    def _attempt(self, progress: Progress) -> None:
        if self._agreement.alone and not self._checkpoints.idle_within(_PATIENCE):
            self._tell(
                f"step {progress.step}: not saved, the save before it is still being written"
            )
            return
        try:
            self._save(progress)
        except SaveError as error:
            self._failed(error)
        else:
            self._last_saved = time.monotonic()

    def _look_at_last(self) -> None:
        try:
            self._checkpoints.raise_failure()
        except SaveError as error:
            self._failed(error)
            return
        if self._checkpoints.saved_step is not None and self._retry_at is None:
            self._backoff = _FIRST_RETRY

    def _failed(self, error: SaveError) -> None:
        self._tell(f"WARNING: {error} Training goes on; the next try is in {self._backoff:.0f} s.")
        self._retry_at = time.monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, _LAST_RETRY)

    def _save_finally(self, progress: Progress) -> None:
        for attempt in range(1, _FINAL_ATTEMPTS + 1):
            try:
                self._save(progress)
                self._checkpoints.wait()
                return
            except SaveError as error:
                if attempt == _FINAL_ATTEMPTS:
                    raise
                self._tell(f"WARNING: {error} Trying again in {2**attempt} s.")
                time.sleep(2**attempt)
