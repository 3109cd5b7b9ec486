"""From process start to the first finished step, with a cold and a warm compile cache."""

import os
import subprocess
import sys
import tempfile
import time

from tests.benchmarks.timing import spread

PAIRS = 3
IMPORTS = "from jaxtpu import environment; environment.prepare(8); import jaxtpu.trainer"
# (what ends, how the line begins that tells it)
MILESTONES = (
    ("imports, configuration, data", "run "),  # the first line of the start-up table
    ("initial state", "initialised:"),
    ("compiling the step", "compiled the train step:"),
    ("reader, log and first step", "step 1/1 "),
)


def import_seconds() -> float:
    """Seconds of a process that imports all that training imports, and nothing else."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - start


def run_seconds(cache: str) -> list[float]:
    """Seconds of a process that trains for one step: up to each milestone from the one before."""
    with tempfile.TemporaryDirectory() as workdir:
        command = [
            sys.executable,
            "run.py",
            "--config=configs/quickstart.py",
            "--config.train.steps=1",
            "--config.train.evaluate_every=0",
            "--config.train.evaluate_batches=1",
            f"--config.compile_cache={cache}",
            f"--workdir={workdir}",
        ]
        times = [time.perf_counter()]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        ) as process:
            for line in process.stdout:
                if len(times) <= len(MILESTONES) and line.startswith(MILESTONES[len(times) - 1][1]):
                    times.append(time.perf_counter())
                if len(times) > len(MILESTONES):
                    process.kill()  # what comes after the first step is no start
        if len(times) <= len(MILESTONES):
            raise RuntimeError(f"exit code {process.returncode}: {' '.join(command)}")
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def row(name: str, cold: list[float], warm: list[float]) -> str:
    ratios = [w / c for w, c in zip(warm, cold, strict=True)]
    return f"{name:<30}{spread(cold):<26}{spread(warm):<26}{spread(ratios)}"


def main() -> int:
    with tempfile.TemporaryDirectory() as cache:
        run_seconds(cache)  # so that the data and the byte code exist, as for every later start
    imports, cold, warm = [], [], []
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory() as cache:
            imports.append(import_seconds())
            cold.append(run_seconds(cache))
            warm.append(run_seconds(cache))
    print(f"{PAIRS} starts of each kind by turns; seconds, medians, in brackets the quartiles")
    print(f"{'':<30}{'cold':<26}{'warm':<26}warm / cold")
    for number, (name, _) in enumerate(MILESTONES):
        print(row(name, [times[number] for times in cold], [times[number] for times in warm]))
        if number == 0:
            print(f"{'  of which imports':<30}{spread(imports)}")
    totals = [sum(times) for times in cold], [sum(times) for times in warm]
    print(row("start to first finished step", *totals))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
