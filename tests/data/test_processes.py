"""Real processes, joined by jax.distributed: each reads its share of the same global batches."""

import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from jaxtpu.data.loader import TrainLoader
from jaxtpu.data.packing import packed
from tests.data.test_mixture import LENGTH, SEED, mixture_of, with_starts

ROWS, BATCHES = 8, 6
PROGRAM = """
import json, sys
from jaxtpu import environment
environment.prepare(int(sys.argv[3]), platform="cpu")
import jax
import numpy as np
process, processes, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, initialization_timeout=60)
from jax.sharding import NamedSharding, PartitionSpec
from jaxtpu.data.order import Position
from tests.data.test_processes import made, read

sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
starts = json.loads(sys.argv[5])
read = {kind: read(made(kind), sharding, Position.from_json(starts[kind])) for kind in starts}
print(json.dumps(read))
"""


def made(kind: str):
    """The same in every process."""
    mixture = mixture_of(["3->1 a", "1 b"], [700, 300], length=40)
    if kind == "mixture":
        return mixture
    stream = mixture.streams[0]
    tokens = stream.tokens.copy()
    tokens[::11] = 256
    stream = with_starts(dataclasses.replace(stream, tokens=tokens))
    return packed(stream, LENGTH) if kind == "packed" else stream


def read(stream, sharding, start) -> dict:
    """By row of the global batches, the targets that this process has; and the last position."""
    rows = {}
    with TrainLoader(
        stream, batch_size=ROWS, sequence_length=LENGTH, seed=SEED, start=start, sharding=sharding
    ) as loader:
        taken = list(itertools.islice(loader, BATCHES))
        for number, (batch, _) in enumerate(taken):
            for shard in batch["targets"].addressable_shards:
                for row, values in zip(range(ROWS)[shard.index[0]], shard.data, strict=True):
                    rows[number * ROWS + row] = np.asarray(values).tolist()
    return {"rows": rows, "position": taken[-1][1].to_json()}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(processes: int, starts: dict[str, dict], port: int) -> dict[str, tuple]:
    """By kind of stream: (targets of every row of the global batches, the position after them,
    rows by process)."""
    command = (sys.executable, "-c", PROGRAM)
    arguments = (str(processes), str(4 // processes), str(port), json.dumps(starts))
    ours = {name: value for name, value in os.environ.items() if name[:4] not in ("XLA_", "JAX_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen((*command, str(p), *arguments), env=ours, **pipes)
        for p in range(processes)
    ]
    results = []
    for process in started:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error[-3000:]
        results.append(json.loads(out.splitlines()[-1]))
    return {kind: _together([result[kind] for result in results]) for kind in starts}


def _together(results: list[dict]) -> tuple[list, dict, list[set]]:
    rows = {int(number): row for result in results for number, row in result["rows"].items()}
    assert len({json.dumps(result["position"]) for result in results}) == 1
    shares = [set(result["rows"]) for result in results]
    return [rows[n] for n in range(ROWS * BATCHES)], results[0]["position"], shares


@pytest.mark.slow
def test_one_and_two_processes_see_the_same_batches_and_resume_each_other():
    port, kinds = free_port(), ("stream", "packed", "mixture")
    new = {kind: {"examples": 0, "seed": SEED, "taken": []} for kind in kinds}
    one, two = run(1, new, port), run(2, new, port)
    after = {kind: one[kind][1] for kind in kinds}
    from_two_to_one = run(1, {kind: two[kind][1] for kind in kinds}, port)
    from_one_to_two = run(2, after, port)
    for kind in kinds:
        assert two[kind][:2] == one[kind][:2]
        first, second = two[kind][2]
        assert not first & second and len(first) == len(second)
        assert from_two_to_one[kind][0] == from_one_to_two[kind][0] != one[kind][0]
