"""Loss curves of every optimizer beside AdamW's, on the quickstart: a table, and a picture.

    python -m tests.benchmarks.optimizers [PICTURE.png]

Learning rates are the usual ones of each optimizer, not tuned: a curve a little above AdamW's says
that the optimizer works, not that it is worse.
"""

import itertools
import pathlib
import statistics
import sys

import matplotlib.pyplot as plt

from jaxtpu.config import load
from jaxtpu.data.loader import TrainLoader
from jaxtpu.data.order import Position
from jaxtpu.observe.memory import tree_bytes_per_device
from jaxtpu.setup import set_up

STEPS, EVERY = 120, 10
BFLOAT16 = {"precision.params": "bfloat16"}
VARIANTS = {
    "adamw": {},
    "adamw, updated layer by layer": {"optimizer.placement": "host"},
    "adamw, bfloat16 moments": {"optimizer.moments": "bfloat16"},
    "adamw, bfloat16 parameters, nearest": BFLOAT16,
    "adamw, bfloat16 parameters, stochastic": BFLOAT16 | {"optimizer.rounding": "stochastic"},
    "adamw, bfloat16 parameters, master": BFLOAT16 | {"optimizer.rounding": "master"},
    "adafactor": {"optimizer.name": "adafactor"},
    "adafactor, bfloat16 parameters, stochastic": BFLOAT16
    | {"optimizer.name": "adafactor", "optimizer.rounding": "stochastic"},
    "lion, a third of the rate": {"optimizer.name": "lion", "optimizer.learning_rate": 1e-3},
    "muon": {"optimizer.name": "muon", "optimizer.beta1": 0.95},
    "sgd, rate 0.3": {"optimizer.name": "sgd", "optimizer.learning_rate": 0.3},
}


def train(changes: dict) -> tuple[list[float], int]:
    """(losses of every step, bytes of optimizer state and parameters on a device)."""
    fields = {"train.steps": STEPS, "train.evaluate_every": 0} | changes
    setup = set_up(load("configs/quickstart.py", [(n, str(v)) for n, v in fields.items()]))
    config, programs = setup.config, setup.programs
    loader = TrainLoader(
        setup.stream,
        batch_size=config.data.batch_size,
        sequence_length=config.data.sequence_length,
        seed=config.seed,
        start=Position(0, config.seed),
        sharding=programs.batch_sharding,
    )
    state, losses = programs.init(), []
    with loader:
        for batch, _ in itertools.islice(loader, STEPS):
            state, metrics = programs.train_step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, tree_bytes_per_device(programs.abstract_state)


def main() -> None:
    path = pathlib.Path(sys.argv[1] if sys.argv[1:] else "runs/optimizers.png")
    figure, axes = plt.subplots(figsize=(9, 6))
    shown = range(STEPS // 3, STEPS + 1, STEPS // 3)
    heads = " ".join(f"{f'step {step}':>9}" for step in shown)
    print(f"{'mean loss of the last 10 steps':44}{heads} {'to adamw':>9} {'state':>9}")
    reference = None
    for name, changes in VARIANTS.items():
        losses, size = train(changes)
        means = [statistics.fmean(losses[step - EVERY : step]) for step in shown]
        reference = reference or means[-1]
        values = " ".join(f"{mean:9.4f}" for mean in means)
        print(
            f"{name:44}{values} {means[-1] - reference:+9.4f} {size / 2**20:5.2f} MiB", flush=True
        )
        axes.plot(range(1, STEPS + 1), losses, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss", title="The quickstart with each optimizer")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
