"""The part of the schema that keeps a run from losing anything."""

import dataclasses

from jaxtpu.config.duration import Duration
from jaxtpu.config.section import Section, option


@dataclasses.dataclass
class CheckpointConfig(Section, path="checkpoint"):
    """When the state is saved, and what is kept."""

    every: Duration = option("20%", "interval of saving; 0 for only at the end")
    every_minutes: float = option(
        0.0, "saved as soon as so many minutes passed; 0: no", at_least=0.0
    )
    keep_last: int = option(2, "latest checkpoints kept", at_least=1)
    keep_every: int = option(
        0, "those at multiples of so many steps are kept besides; 0: none", at_least=0
    )
    keep_best: int = option(1, "checkpoints of the best validation metric kept besides", at_least=0)
    best_by: str = option(
        "loss", "which metric of the validation is best", choices=("loss", "accuracy")
    )
    directory: str = option("", "their folder, gs://... too; empty means <workdir>/checkpoints")
    init_from: str = option(
        "", "a run's folder, or its checkpoints': a new run starts with parameters from there"
    )
    init_params: tuple[str, ...] = option(
        (".*",), "paths of the parameters that init_from gives; the others start new"
    )


@dataclasses.dataclass
class GuardConfig(Section, path="guard"):
    """What happens where the loss or the gradient is not finite, or spikes."""

    nonfinite: str = option(
        "stop",
        "stop: the run ends, with a dump to replay; skip: the update is dropped; rollback: back to "
        "the last checkpoint, past the batches since",
        choices=("stop", "skip", "rollback"),
    )
    limit: int = option(
        10, "the run ends after so many dropped updates, or rollbacks, in a row", at_least=1
    )
    clip_zscore: float = option(
        0.0, "gradient norms so many standard deviations above their mean are clipped (ZClip, "
        "2.5 there); 0: none", at_least=0.0,
    )  # fmt: skip


@dataclasses.dataclass
class WatchdogConfig(Section, path="watchdog"):
    """Seconds a phase may take before the process says what it waits for, and ends; 0: no limit."""

    start: float = option(300.0, "until all processes have joined", at_least=0.0)
    compile: float = option(3600.0, "compilation, or initialisation of the state", at_least=0.0)
    restore: float = option(3600.0, "verifying and reading a checkpoint", at_least=0.0)
    step: float = option(600.0, "from one step to the next", at_least=0.0)
    evaluate: float = option(3600.0, "an evaluation", at_least=0.0)
    save: float = option(
        1800.0, "the loop's part of a save, or the end of the last one", at_least=0.0
    )
    straggler: float = option(
        2.0, "named in the log: a process that waits so many times longer for its input than the "
        "median of all; 0: none", at_least=0.0,
    )  # fmt: skip
