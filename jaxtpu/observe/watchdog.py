"""The watchdog: every phase of a run has a deadline, so that nothing waits for ever in silence."""

import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable

import jax

from jaxtpu.config import WatchdogConfig
from jaxtpu.errors import EXIT_HUNG
from jaxtpu.processes import host_of, key_value_store, primary

_PERIOD = 2.0  # seconds between reports to the other processes
_SILENT = 5 * _PERIOD  # a process that has not reported for so long is late
_GRACE = 6.0  # seconds that process 0, which the others need to report, ends after them


class Watchdog:
    """Ends this process, with what it waited for, when a phase is past its deadline.

    Every process reports its phase and step to the others; past a deadline, those that are silent
    or behind are named, the stacks of all threads are printed, and the exit code is `EXIT_HUNG`.

    Args:
      config: the deadline of each phase.
      stop: ends the process; for tests.
    """

    def __init__(self, config: WatchdogConfig, stop: Callable[[int], None] = os._exit):
        self._seconds = {
            "start": config.start,
            "compile": config.compile,
            "restore": config.restore,
            "step": config.step,
            "evaluate": config.evaluate,
            "save": config.save,
        }
        self._straggler, self._stop = config.straggler, stop
        self._phases: list[tuple[str, float]] = []  # name, seconds; the innermost last
        self._since, self._step, self._waited = time.monotonic(), 0, 0.0
        self._reports: dict[int, tuple[dict, float]] = {}  # and when it was new
        self._reached = time.monotonic()
        self._slow: dict[int, int] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, name="jaxtpu-watchdog", daemon=True).start()
        if jax.process_count() > 1:
            threading.Thread(target=self._exchange, name="jaxtpu-reports", daemon=True).start()
        return self

    def __exit__(self, *_exception) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def phase(self, name: str):
        """What is done inside has the deadline `watchdog.<name>`; the clock of what is around it
        starts anew afterwards."""
        self._phases.append((name, self._seconds[name]))
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._phases.pop()
            self._since = time.monotonic()

    def beat(self, step: int, waited: float = 0.0) -> None:
        """A step was dispatched: the clock starts anew.

        Args:
          waited: seconds that this process has waited for its input so far.
        """
        self._step, self._waited, self._since = step, waited, time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            name, seconds = self._phases[-1] if self._phases else ("", 0.0)
            if seconds and time.monotonic() - self._since > seconds:
                self._tell(name, seconds)
                if primary() and jax.process_count() > 1:
                    time.sleep(_GRACE)
                self._stop(EXIT_HUNG)
                return

    def _tell(self, name: str, seconds: float) -> None:
        after = f" after step {self._step}" if self._step else ""
        lines = [f"error: watchdog: waited more than watchdog.{name}={seconds:g} s{after}."]
        late = self.late()
        if jax.process_count() > 1:
            lines += [f"  late: {text}" for text in late] or ["  no process is late"]
        lines.append("The same command resumes from the last checkpoint. Stacks of all threads:")
        print("\n".join(lines), file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # a closed or replaced stderr must not keep us here
            faulthandler.dump_traceback(all_threads=True)

    def late(self) -> list[str]:
        """The processes that are silent, or behind this one, with what they did last."""
        now, late = time.monotonic(), []
        if now - self._reached > _SILENT and not primary():
            return ["process 0 does not answer, and holds what the others report"]
        for process in range(jax.process_count()):
            if process == jax.process_index():
                continue
            report, at = self._reports.get(process, ({"phase": "start", "step": 0}, self._reached))
            what = f"last seen in {report['phase'] or 'start'} after step {report['step']}"
            if process not in self._reports or now - at > _SILENT:
                late.append(f"{host_of(process)} is silent for {now - at:.0f} s, {what}")
            elif report["step"] < self._step:
                late.append(f"{host_of(process)} is behind, {what}")
        return late

    def _exchange(self) -> None:
        """In a thread of its own, since the store may not answer."""
        store, me, count = key_value_store(), jax.process_index(), 0
        while not self._ended.wait(_PERIOD):
            count += 1
            phase = self._phases[-1][0] if self._phases else ""
            mine = {"n": count, "phase": phase, "step": self._step, "waited": self._waited}
            try:
                store.key_value_set(f"jaxtpu/alive/{me}", json.dumps(mine), allow_overwrite=True)
                found = store.key_value_dir_get("jaxtpu/alive/")
            except jax.errors.JaxRuntimeError:
                continue  # process 0 does not answer: `late` says so
            self._reached = time.monotonic()
            for key, text in found:
                process, report = int(key.rpartition("/")[2]), json.loads(text)
                if self._reports.get(process, ({}, 0.0))[0].get("n") != report["n"]:
                    self._reports[process] = report, self._reached

    def stragglers(self) -> list[str]:
        """Processes that have waited for their input `watchdog.straggler` times as long as the
        median, and over a second, in three calls one after the other."""
        waits = {process: report["waited"] for process, (report, _) in self._reports.items()}
        if len(waits) < 2 or not self._straggler:
            return []
        median = statistics.median_low(waits.values())
        named = []
        for process, waited in waits.items():
            slow = waited > max(1.0, self._straggler * median)
            self._slow[process] = self._slow.get(process, 0) + 1 if slow else 0
            if self._slow[process] == 3:
                named.append(
                    f"{host_of(process)} is slow at its input: it has waited {waited:.1f} s, the "
                    f"median process {median:.1f} s"
                )
        return named
