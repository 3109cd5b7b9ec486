"""A line on stderr about work that takes longer than a person expects."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

_FIRST_SECONDS = 3.0
_NEXT_SECONDS = 30.0


@contextlib.contextmanager
def told_if_slow(work: str) -> Iterator[None]:
    """Says `work` after 3 seconds of it and every 30 seconds, and at the end how long it took.

    Work that takes less than 3 seconds says nothing.

    Args:
      work: what is done, as in "Preparing the data set imdb_reviews".
    """
    done = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        wait = _FIRST_SECONDS
        while not done.wait(wait):
            _say(f"{work} ... {time.monotonic() - start:.0f} s")
            wait = _NEXT_SECONDS

    thread = threading.Thread(target=tell, name="jaxtpu-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        seconds = time.monotonic() - start
    if seconds > _FIRST_SECONDS:
        _say(f"{work}: done in {seconds:.0f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
