"""The input pipeline: beside the step, beside a PyTorch DataLoader, to resume, and its memory.

    python -m tests.benchmarks.input [step|torch|resume|memory ...]

Both sides of `torch` do the same to the same documents of this Python's library: tokenise with the
same byte-level BPE, pack into sequences of 1024 with segment ids and positions, and batch; once as
a first epoch, and once as any further one, for which ours has its tokens.
"""

import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

LENGTH, ROWS, WORKERS, VOCABULARY = 1024, 16, 2, 4096
_WAIT_BAR, _TORCH_BAR, _RESUME_BAR = 0.02, 2.0, 5.0
_MILLION = 1_000_000


def quickstart_setup(fields: dict):
    """(setup of the quickstart with these fields)."""
    from jaxtpu.config import load
    from jaxtpu.setup import set_up

    return set_up(load("configs/quickstart.py", [(n, str(v)) for n, v in fields.items()]))


def beside_the_step() -> bool:
    """Tokens/s of the pipeline to the device, and of the step; what a run waits for input."""
    from jaxtpu.data.loader import TrainLoader
    from jaxtpu.data.order import Position

    setup = quickstart_setup({"data.prefetch": 2})
    config, programs = setup.config, setup.programs
    tokens = config.data.batch_size * config.data.sequence_length
    loader = lambda: TrainLoader(  # noqa: E731
        setup.stream,
        batch_size=config.data.batch_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
        start=Position(0, config.seed),
        sharding=programs.batch_sharding,
    )
    step = programs.train_step.lower(programs.abstract_state, programs.abstract_batch).compile()
    with loader() as batches:
        next(batches)
        started = time.perf_counter()
        jax.block_until_ready([batch for batch, _ in itertools.islice(batches, 200)][-1])
        alone = 200 * tokens / (time.perf_counter() - started)
    with loader() as batches:
        state = programs.init()
        state, _ = step(state, next(batches)[0])
        jax.block_until_ready(state)
        waited, started = batches.wait_seconds, time.perf_counter()
        for batch, _ in itertools.islice(batches, 40):
            state, _ = step(state, batch)
            jax.block_until_ready(state.step)  # the loop lets two steps be under way
        seconds = time.perf_counter() - started
        share = (batches.wait_seconds - waited) / seconds
    print(
        f"the pipeline alone {alone:,.0f} tokens/s; the step {40 * tokens / seconds:,.0f} tokens/s"
    )
    print(f"  pipeline / step {alone * seconds / 40 / tokens:.1f}; waits for input {share:.2%} "
          f"(bar {_WAIT_BAR:.0%}: {_met(share < _WAIT_BAR)})")  # fmt: skip
    return share < _WAIT_BAR


def beside_torch() -> bool:
    """Tokens/s of a first epoch, and of a further one, beside a DataLoader's."""
    with tempfile.TemporaryDirectory() as folder:
        texts, tokenizer = _corpus(pathlib.Path(folder))
        theirs = [_torch_epoch(texts, tokenizer) for _ in range(2)]
        ours = [_our_epoch(pathlib.Path(folder)) for _ in range(2)]
    ok = True
    for name, (tokens, seconds), (their_tokens, their_seconds) in zip(
        ("first epoch", "further epoch"), ours, theirs, strict=True
    ):
        ratio = tokens / seconds / (their_tokens / their_seconds)
        print(f"{name}: ours {tokens / seconds:,.0f} tokens/s ({tokens:,} tokens), DataLoader with "
              f"{WORKERS} workers {their_tokens / their_seconds:,.0f} ({their_tokens:,} tokens): "
              f"{ratio:.2f} (bar {_TORCH_BAR:g}: {_met(ratio >= _TORCH_BAR)})")  # fmt: skip
        ok &= ratio >= _TORCH_BAR
    return ok


def _corpus(folder: pathlib.Path) -> tuple[list[str], str]:
    """The library's documents, also as files, and a tokenizer trained on them."""
    from rich.console import Console

    from jaxtpu.config import load
    from jaxtpu.data.python_corpus import read_documents
    from jaxtpu.data.train_tokenizer import train_tokenizer

    texts = list(read_documents(pathlib.Path(json.__file__).parents[1])[0].values())
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    config = load("configs/quickstart.py", [("data.source", f"files:{folder}/corpus.jsonl"),
                                            ("data.validation_split", "")])  # fmt: skip
    train_tokenizer(config, VOCABULARY, str(folder), Console(quiet=True), True)
    return texts, str(folder / "tokenizer.json")


def _our_epoch(folder: pathlib.Path) -> tuple[int, float]:
    """(tokens, seconds) of an epoch on the device, from the configuration on."""
    from jax.sharding import SingleDeviceSharding

    from jaxtpu.config import Config
    from jaxtpu.data.loader import TrainLoader
    from jaxtpu.data.order import Position
    from jaxtpu.data.streams import open_split
    from jaxtpu.data.tokenizer import make_tokenizer

    config = Config()
    config.data.update({
        "source": f"files:{folder}/corpus.jsonl", "train_split": "all", "packing": "pack",
        "tokenizer": f"hf:{folder}", "sequence_length": LENGTH, "directory": str(folder / "data"),
    })  # fmt: skip
    started = time.perf_counter()
    stream = open_split(config.data, "train_split", make_tokenizer(config.data.tokenizer))
    batches = stream.examples(LENGTH) // ROWS
    tokens = 0
    with TrainLoader(
        stream, batch_size=ROWS, sequence_length=LENGTH, seed=0, start=Position(0, 0),
        sharding=SingleDeviceSharding(jax.devices()[0]),
    ) as loader:  # fmt: skip
        for batch, _ in itertools.islice(loader, batches):
            tokens += int(np.asarray(batch["weights"]).sum())
    return tokens, time.perf_counter() - started


def _torch_epoch(texts: list[str], tokenizer: str) -> tuple[int, float]:
    import torch

    from tests.benchmarks.torch_packing import Packed

    started = time.perf_counter()
    loader = torch.utils.data.DataLoader(
        Packed(texts, tokenizer, LENGTH), batch_size=ROWS, num_workers=WORKERS, drop_last=True,
        prefetch_factor=2,
    )  # fmt: skip
    tokens = 0
    for batch in loader:
        on_device = {name: jax.device_put(values.numpy()) for name, values in batch.items()}
        tokens += int(np.asarray(on_device["weights"]).sum())
    return tokens, time.perf_counter() - started


def to_resume() -> bool:
    """Seconds from nothing to the first batch, in the middle of a million documents."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "million.jsonl"
        numbers = random.Random(0)
        with open(path, "w") as file:
            for number in range(_MILLION):
                text = f"document {number} " + "x" * numbers.randrange(200)
                file.write(json.dumps({"text": text}) + "\n")
        first = _fresh("resume_once", folder, "0")
        later = [_fresh("resume_once", folder, str(at)) for at in (7, 123_456, 3_999_999)]
    worst = max(seconds for seconds, _ in later)
    print(f"{_MILLION:,} documents, packed: the first start {first[0]:.1f} s (tokenised); resumed at "
          f"examples 7, 123,456 and 3,999,999: at most {worst:.2f} s to the first batch "
          f"(bar {_RESUME_BAR:g}: {_met(worst < _RESUME_BAR)})")  # fmt: skip
    return worst < _RESUME_BAR


def resume_once(folder: str, at: str) -> tuple[float, int]:
    """(seconds to the first batch, largest memory in MiB) of a new process."""
    from jax.sharding import SingleDeviceSharding

    from jaxtpu.config import Config
    from jaxtpu.data.loader import TrainLoader
    from jaxtpu.data.order import Position
    from jaxtpu.data.streams import open_split
    from jaxtpu.data.tokenizer import make_tokenizer

    config = Config()
    config.data.update({"source": f"files:{folder}/million.jsonl", "train_split": "all",
                        "packing": "pack", "directory": folder})  # fmt: skip
    started = time.perf_counter()
    stream = open_split(config.data, "train_split", make_tokenizer("bytes"))
    with TrainLoader(
        stream, batch_size=ROWS, sequence_length=256, seed=0, start=Position(int(at), 0),
        sharding=SingleDeviceSharding(jax.devices()[0]),
    ) as loader:  # fmt: skip
        next(loader)
    return time.perf_counter() - started, _peak_mib()


def its_memory() -> bool:
    """The largest memory of a process that reads all of a corpus, by the size of that."""
    budget = 32
    with tempfile.TemporaryDirectory() as folder:
        peaks = {}
        for times in (1, 5, 20):
            path = pathlib.Path(folder) / f"{times}.npy"
            np.save(path, np.random.default_rng(0).integers(0, 256, times * budget * 2**19, "u2"))
            peaks[times] = _fresh("read_all", str(path), str(budget))[1]
    grown = peaks[20] - peaks[1]
    words = ", ".join(f"{times} times {budget} MiB: {peak} MiB" for times, peak in peaks.items())
    print(f"largest memory with data.cache_gib of {budget} MiB, by the size of the tokens: {words}")
    print(f"  {grown:+d} MiB from 1 to 20 times (bar {budget} MiB: {_met(grown < budget)})")
    return grown < budget


def read_all(path: str, budget: str) -> tuple[float, int]:
    """(seconds, largest memory in MiB) of a new process that reads an epoch."""
    from jaxtpu.data.token_cache import Selection, open_tokens
    from jaxtpu.data.tokenizer import make_tokenizer

    started = time.perf_counter()
    tokenizer = make_tokenizer("ids:256:255")
    stream = open_tokens(Selection(f"tokens:{path}", "train"), tokenizer, "", int(budget) * 2**20)
    order = np.random.default_rng(0).permutation(stream.examples(2048))
    for rows in np.array_split(order, max(1, len(order) // 64)):
        stream.example_batch(rows, 2048)
    return time.perf_counter() - started, _peak_mib()


def _fresh(function: str, *arguments: str) -> tuple[float, int]:
    """What a function of this file gives in a new process."""
    program = (
        f"import sys, json; from tests.benchmarks import input as here\n"
        f"print(json.dumps(here.{function}(*sys.argv[1:])))"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def _peak_mib() -> int:
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def _met(good: bool) -> str:
    return "met" if good else "missed"


_PARTS = {"step": beside_the_step, "torch": beside_torch, "resume": to_resume, "memory": its_memory}


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(_PARTS)
    results = [_PARTS[name]() for name in chosen]  # every one is run
    sys.exit(0 if all(results) else 1)
