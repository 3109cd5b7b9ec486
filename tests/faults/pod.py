"""Several real processes of one run on this machine, joined by `jax.distributed` over gloo."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'tests' / 'configs' / 'tiny.py'}"
DEVICES = 8


class Pod:
    """The processes of a run, each with its part of eight emulated devices.

    Use it as a context manager: at the end none of them is left.

    Args:
      workdir: of the run.
      processes: how many; each has `DEVICES // processes` devices.
      words: what follows on the command line.
    """

    def __init__(self, workdir: pathlib.Path, processes: int, *words: str):
        self.workdir, self.outputs = workdir, []
        place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
        place = [f"{a}={b}" for a, b in zip(place[::2], place[1::2], strict=True)]
        ours = {k: v for k, v in os.environ.items() if k[:4] not in ("XLA_", "JAX_")}
        self.processes = []
        workdir.mkdir(parents=True, exist_ok=True)
        for process in range(processes):
            own = [f"--process_id={process}"] if processes > 1 else []
            output = (workdir / f"output-{process}.txt").open("w+")
            self.outputs.append(output)
            command = [
                sys.executable, str(ROOT / "run.py"), CONFIG, f"--workdir={workdir}",
                f"--config.mesh.emulate={DEVICES // processes}", *words,
                *(place if processes > 1 else []), *own,
            ]  # fmt: skip
            self.processes.append(
                subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=ours, cwd=ROOT
                )
            )

    def __enter__(self) -> "Pod":
        return self

    def __exit__(self, *_exception) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for output in self.outputs:
            output.close()

    def output(self, process: int) -> str:
        """What a process has printed so far."""
        return (self.workdir / f"output-{process}.txt").read_text(errors="replace")

    def until(self, what: Callable[[], bool], seconds: float = 180) -> bool:
        """Waits for `what`; False where every process ended before.

        Raises:
          TimeoutError: with what the processes printed.
        """
        end = time.monotonic() + seconds
        while not what():
            if all(process.poll() is not None for process in self.processes):
                return what()
            if time.monotonic() > end:
                raise TimeoutError("\n".join(map(self.output, range(len(self.processes)))))
            time.sleep(0.002)
        return True

    def wait(self, seconds: float = 180) -> list[int]:
        """The exit code of each process."""
        self.until(lambda: all(p.poll() is not None for p in self.processes), seconds)
        return [process.returncode for process in self.processes]

    def kill(self, process: int, number: int = signal.SIGKILL) -> None:
        self.processes[process].send_signal(number)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def steps_told(workdir: pathlib.Path) -> int:
    """The last step whose metrics are written."""
    return max(losses(workdir), default=0)


def losses(workdir: pathlib.Path) -> dict[int, tuple[float, ...]]:
    """(loss, gradient norm, tokens) by step; a line that is half written does not count."""
    path, found = workdir / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if "train/loss" in values:
            names = ("loss", "grad_norm", "tokens")
            found[values["step"]] = tuple(values[f"train/{name}"] for name in names)
    return found
