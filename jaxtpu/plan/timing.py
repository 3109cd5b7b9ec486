"""How long a step of a compiled program takes, told from its schedule without a TPU.

Compute takes the compiler's own `estimated_cycles`, as they are: its cost model knows the memory
traffic of an operation. The rest is modelled: collectives in `collectives.py`, what else there is
in `playback.py`, which plays the schedule through. The constants of the model stand at the head of
those two modules.
"""

import dataclasses

from jaxtpu.hardware import Slice
from jaxtpu.plan.collectives import Collective
from jaxtpu.plan.hlo import Module
from jaxtpu.plan.playback import CATEGORIES, CONSTANTS, Constants, Player


@dataclasses.dataclass(frozen=True)
class TimePrediction:
    """A step as predicted; seconds, cycles and bytes are those of one device.

    Attributes:
      seconds: by CATEGORIES; `attention` is scores, softmax and mixing, not its projections.
      exposed: seconds waited for collectives, by kind (`dcn`: those between slices).
      hidden: seconds of collectives that compute covers, by kind.
      cycles: the compiler's, of all operations that have any: Pallas kernels have none.
      kernel_seconds: of Pallas kernels; a part of `seconds`.
      kernel_flops: of their products.
      collectives: each collective, and how often it runs in a step.
      unknown_loops: names of loops whose length the program does not tell: counted once.
    """

    seconds: dict[str, float]
    exposed: dict[str, float]
    hidden: dict[str, float]
    cycles: int
    kernel_seconds: float = 0.0
    kernel_flops: float = 0.0
    collectives: tuple[tuple[Collective, int], ...] = ()
    unknown_loops: tuple[str, ...] = ()

    @property
    def compute_seconds(self) -> float:
        """All but communication."""
        return sum(self.seconds.values())

    @property
    def exposed_seconds(self) -> float:
        """Communication that nothing hides."""
        return sum(self.exposed.values())

    @property
    def step_seconds(self) -> float:
        """From the start of a step to its end."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def communication(self) -> dict[str, tuple[int, int]]:
        """(runs, bytes) of a step's collectives, by kind."""
        totals: dict[str, tuple[int, int]] = {}
        for collective, count in self.collectives:
            runs, size = totals.get(collective.kind, (0, 0))
            totals[collective.kind] = (runs + count, size + count * collective.bytes)
        return totals

    def to_json(self) -> dict:
        """Everything, as JSON values."""
        fields = ("kind", "bytes", "group_size", "op_name", "seconds")
        return {
            "step_seconds": self.step_seconds,
            "cycles": self.cycles,
            "seconds": self.seconds,
            "exposed_communication_seconds": self.exposed,
            "hidden_communication_seconds": self.hidden,
            "collectives": [
                {"count": count, **{field: getattr(collective, field) for field in fields}}
                for collective, count in self.collectives
            ],
            "unknown_loops": list(self.unknown_loops),
        }


def predict_time(module: Module, slice_: Slice, constants: Constants = CONSTANTS) -> TimePrediction:
    """The time of one run of `module`, as compiled for `slice_`."""
    player = Player(module, slice_, constants)
    player.run(module.entry)
    player.wait_for_all()
    return TimePrediction(
        seconds={name: player.seconds[name] for name in CATEGORIES},
        exposed=dict(player.exposed),
        hidden={
            kind: max(0.0, seconds - player.exposed[kind]) for kind, seconds in player.busy.items()
        },
        cycles=player.cycles,
        kernel_seconds=player.kernel_seconds,
        kernel_flops=player.kernel_flops,
        collectives=tuple(player.collectives.items()),
        unknown_loops=tuple(dict.fromkeys(player.unknown_loops)),
    )


def mfu(prediction: TimePrediction, flops_per_token: float, tokens: int, slice_: Slice) -> float:
    """Model FLOPs utilisation, 0 to 1: what a step needs, of what all devices could do meanwhile.

    Args:
      flops_per_token: to train on a token, without recomputation (PaLM, arXiv:2204.02311).
      tokens: of the global batch.
    """
    peak = slice_.generation.peak_flops_bf16 * slice_.devices
    return flops_per_token * tokens / prediction.step_seconds / peak
