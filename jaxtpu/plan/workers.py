"""Processes that do tasks for this one, and whose death, noise and end are under control.

They are started from scratch, not forked: a fork of a process that runs JAX can hang. Tasks go in
and answers come back as lines of JSON; whatever else a worker writes goes to a file, whose end
tells why it died. A worker ends when its standard input does, so none outlives its parent.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_ROOT = pathlib.Path(__file__).parents[2]
_TAIL = 8192  # bytes of a dead worker's output that are kept
_FATAL = re.compile(r"^(?:F\d{4} |Fatal Python error|ERROR: ).*", re.MULTILINE)
_WAIT_S = 10.0  # for a process that has closed its output


@dataclasses.dataclass(frozen=True)
class Died:
    """A worker ended before it answered.

    Attributes:
      reason: how, in a line.
      output: the last of what it wrote.
    """

    reason: str
    output: str


@dataclasses.dataclass(eq=False)
class Worker:
    """A process, the key of the task that it is at, and what it wrote.

    Attributes:
      process: leads a session of its own, so that Ctrl-C reaches the parent only.
      log: everything that it wrote besides answers.
      task: key; None while it is idle.
      unread: of an answer that is not complete yet.
    """

    process: subprocess.Popen
    log: BinaryIO
    task: str | None = None
    unread: bytes = b""

    def give(self, key: str, task: dict[str, Any]) -> None:
        self.task = key
        with contextlib.suppress(BrokenPipeError):  # it is dead: the end of its output will tell
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> tuple[bool, bytes | None]:
        """(whether it lives, a complete answer or None); called when there is output to read."""
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.unread += data
        line, newline, rest = self.unread.partition(b"\n")
        if not newline:
            return bool(data), None
        self.unread = rest
        return True, line

    def died(self) -> Died:
        """How it ended; it is dead, or is killed now."""
        try:
            code = self.process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            code = self.process.wait()
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - _TAIL))
        output = self.log.read().decode(errors="replace")
        return Died(_reason(code, output), output)

    def stop(self) -> None:
        """Kills it with all that it may have started; `wait` is left to the caller."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def _reason(code: int, output: str) -> str:
    fatal = _FATAL.findall(output)
    last = fatal[-1] if fatal else (output.strip().splitlines() or [""])[-1] if code > 0 else ""
    if code == -signal.SIGKILL:
        how = "was killed (SIGKILL): the machine may be out of memory"
    elif code < 0:
        how = f"crashed ({signal.Signals(-code).name})"
    else:
        how = f"ended with exit code {code}"
    return f"the process {how}" + (f": {last[:500]}" if last else "")


def start_worker(function: str, environment: dict[str, str]) -> Worker:
    """Starts a process that calls a function, which calls `serve`.

    Args:
      function: `package.module:name`.
      environment: all its environment variables; PYTHONPATH gets this package.
    """
    module, name = function.split(":")
    paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    log = tempfile.TemporaryFile()  # noqa: SIM115 (the worker closes it)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {module} import {name}; {name}()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    return Worker(process, log)


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A worker's life: answers tasks until its standard input ends, then dies, busy or not."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing but answers goes to the parent
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read_tasks():
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)

    threading.Thread(target=read_tasks, daemon=True).start()
    while True:
        print(json.dumps(handle(json.loads(tasks.get()))), file=answers, flush=True)


class Pool:
    """Workers, started as tasks need them, and killed when the `with` block ends.

    Args:
      function: what a worker runs, `package.module:name`.
      environment: of the workers.
      size: workers at a time.
    """

    def __init__(self, function: str, environment: dict[str, str], size: int):
        self._function, self._environment, self._size = function, environment, size
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        for worker in self._workers:  # all are told before any is waited for
            worker.stop()
        for worker in self._workers:
            worker.close()
        self._selector.close()

    def run(
        self, tasks: dict[str, dict[str, Any]], deadline: float = math.inf
    ) -> Iterator[tuple[str, dict[str, Any] | Died]]:
        """(key, answer) of each task as it is done. A worker that dies fails its task only.

        Args:
          tasks: by key.
          deadline: `time.monotonic()` at which it stops, whatever is not done.
        """
        waiting = collections.deque(tasks.items())
        while time.monotonic() < deadline:
            self._assign(waiting)
            if not any(worker.task for worker in self._workers):
                return
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            for ready, _ in self._selector.select(timeout):
                key, answer = self._receive(ready.data)
                if key is not None and answer is not None:
                    yield key, answer

    def _assign(self, waiting: collections.deque[tuple[str, dict[str, Any]]]) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        while waiting and (idle or len(self._workers) < self._size):
            worker = idle.pop() if idle else self._start()
            worker.give(*waiting.popleft())

    def _start(self) -> Worker:
        worker = start_worker(self._function, self._environment)
        self._workers.append(worker)
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _receive(self, worker: Worker) -> tuple[str | None, dict[str, Any] | Died | None]:
        """The task that has come to its end and its answer; None for what there is not."""
        alive, line = worker.read()
        key = worker.task
        if line is not None:
            worker.task = None
            return key, json.loads(line)
        if alive:
            return key, None
        self._selector.unregister(worker.process.stdout)
        self._workers.remove(worker)
        died = worker.died()
        worker.close()
        return key, died
