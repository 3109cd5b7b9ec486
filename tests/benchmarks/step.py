"""The framework's train step beside the same step written by hand: equal losses, then times."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxtpu.config import load, to_steps
from jaxtpu.data.loader import TrainLoader
from jaxtpu.data.order import Position
from jaxtpu.setup import Setup, set_up
from tests.benchmarks import handwritten
from tests.benchmarks.timing import interleave, report

BAR = 1.05
SECONDS = 75
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
OPERATIONS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
              "dot", "copy", "transpose", "fusion")  # fmt: skip


def quickstart(compute: str = "bfloat16") -> Setup:
    """The quickstart, with nothing compiled yet."""
    return set_up(load("configs/quickstart.py", [("precision.compute", compute)]))


def first_batches(setup: Setup, number: int) -> list:
    """The first batches of training, on the devices."""
    data = setup.config.data
    loader = TrainLoader(
        setup.stream,
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        seed=setup.config.seed,
        start=Position(0, setup.config.seed),
        sharding=setup.programs.batch_sharding,
    )
    with loader:
        return [batch for batch, _ in itertools.islice(loader, number)]


def by_hand(setup: Setup) -> handwritten.Step:
    """The hand-written step of the same configuration."""
    config, optimizer = setup.config, setup.config.optimizer
    settings = handwritten.Settings(
        vocab_size=config.model.vocab_size,
        rope_theta=config.model.rope_theta,
        norm_epsilon=config.model.norm_epsilon,
        dtype=jnp.dtype(config.precision.compute),
        peak=optimizer.learning_rate,
        warmup=to_steps("optimizer.warmup", optimizer.warmup, setup.units),
        steps=setup.units.steps,
        final_fraction=optimizer.final_fraction,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        clip_norm=optimizer.clip_norm,
    )
    abstract = renamed(setup.programs.abstract_state.params)
    return handwritten.make_step(setup.programs.mesh, abstract, settings)


def renamed(params):
    """The framework's parameters under the names of the hand-written step."""
    layers = params["decoder"]["layers"]
    attention, mlp = layers["attention"], layers["mlp"]
    return {
        "embed": params["embedding"]["table"],
        "layers": {
            "attention_norm": layers["attention_norm"]["scale"],
            "q": attention["query"]["kernel"],
            "k": attention["key"]["kernel"],
            "v": attention["value"]["kernel"],
            "o": attention["out"]["kernel"],
            "mlp_norm": layers["mlp_norm"]["scale"],
            "gate": mlp["gate"]["kernel"],
            "up": mlp["up"]["kernel"],
            "down": mlp["down"]["kernel"],
        },
        "final_norm": params["decoder"]["final_norm"]["scale"],
        "head": params["head"]["kernel"],
    }


class Ours:
    """The framework's compiled step with its state."""

    def __init__(self, setup: Setup, batch):
        self.state = setup.programs.init()
        self.compiled = setup.programs.train_step.lower(self.state, batch).compile()

    def __call__(self, batch) -> dict[str, jax.Array]:
        self.state, metrics = self.compiled(self.state, batch)
        return jax.block_until_ready(metrics)


class Theirs:
    """The hand-written compiled step with its state, from the framework's initial parameters."""

    def __init__(self, setup: Setup, batch):
        step = by_hand(setup)
        initial = jax.tree.map(np.asarray, renamed(setup.programs.init().params))
        self.params = jax.device_put(initial, step.param_shardings)
        self.opt_state = step.init_optimizer(self.params)
        self.compiled = step.run.lower(self.params, self.opt_state, batch).compile()

    def __call__(self, batch) -> dict[str, jax.Array]:
        self.params, self.opt_state, metrics = self.compiled(self.params, self.opt_state, batch)
        return jax.block_until_ready(metrics)


def compare_losses(ours, theirs, batches, compute: str) -> bool:
    """Prints the first losses of both, and whether they and all other metrics agree."""
    worst: dict[str, float] = collections.defaultdict(float)
    print(f"{compute}: loss of ours / by hand:", end="")
    for batch in batches:
        a, b = (
            {name: float(value) for name, value in step(batch).items()} for step in (ours, theirs)
        )
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        print(f"  {a['loss']:.6f} / {b['loss']:.6f}", end="")
        for name in a:
            worst[name] = max(worst[name], abs(a[name] / b[name] - 1))
    agree = worst["loss"] <= TOLERANCES[compute]
    others = ", ".join(f"{name} {value:.1e}" for name, value in worst.items() if name != "loss")
    print(f"\n  largest relative difference {worst['loss']:.1e} (at most {TOLERANCES[compute]:g}: "
          f"{'met' if agree else 'NOT met'}); of other metrics: {others}")  # fmt: skip
    return agree


def describe(name: str, compiled) -> str:
    """What the compiler made of a step: flops, bytes, temporaries, operations by kind."""
    cost, text = compiled.cost_analysis(), compiled.as_text()
    counts = collections.Counter(re.findall(r" ([a-z][a-z-]*?)(?:-start)?\(", text))
    counted = ", ".join(f"{counts[op]} {op}" for op in OPERATIONS if counts[op])
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return (f"  {name}: {cost['flops'] / 1e6:.1f} MFLOP, {cost['bytes accessed'] / 1e6:.1f} MB "
            f"accessed, {temporary:.1f} MiB temporary; {counted}")  # fmt: skip


def main() -> int:
    agree = True
    for compute in TOLERANCES:  # the last one is timed: the quickstart's own
        setup = quickstart(compute)
        batches = first_batches(setup, 3)
        ours, theirs = Ours(setup, batches[0]), Theirs(setup, batches[0])
        agree &= compare_losses(ours, theirs, batches, compute)
    print("compiled, for one device (a loop's body is counted once):")
    print(describe("ours", ours.compiled))
    print(describe("by hand", theirs.compiled))
    batch = batches[0]
    costs = interleave(lambda: ours(batch), lambda: theirs(batch), SECONDS)
    return 0 if report("ours", "by hand", costs, bar=BAR) and agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
