"""What a compiled program's memory is for: parts that add up to the compiler's own total.

The compiler gives one number (`CompileResult.hbm_bytes`); the live ranges of its schedule
(`liveness`) give the buffers at the peak. Both are shown, with what is between them as parts of
their own: the holes that packing the buffers leaves, by the compiler's account, and whatever the
walk has wrong.
"""

import dataclasses
import math
import os
import re
from collections import Counter

from jaxtpu.plan.compile_cache import CompileResult, read_hlo
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.liveness import Buffer, Event, Loop, Timeline, timeline

PARAMETERS, OPTIMIZER, BATCH = "parameters", "optimizer state", "batch"
GRADIENTS, ACTIVATIONS = "gradients", "saved activations"
LOGITS, WEIGHT_COPIES, COLLECTIVES = "logits and loss", "weight copies", "collective buffers"
ATTENTION, TEMPORARIES, RESULTS = "attention temporaries", "other temporaries", "results"
PADDING, HOLES, UNEXPLAINED = "padding to tiles", "holes between buffers", "not explained"
PARTS = (
    PARAMETERS, OPTIMIZER, BATCH, GRADIENTS, ACTIVATIONS, LOGITS, WEIGHT_COPIES, COLLECTIVES,
    ATTENTION, TEMPORARIES, RESULTS, PADDING, HOLES, UNEXPLAINED,
)  # fmt: skip
_ONE = {PARAMETERS: "parameter", GRADIENTS: "gradient", ACTIVATIONS: "saved activation"} | {
    WEIGHT_COPIES: "weight copy", COLLECTIVES: "collective buffer", RESULTS: "result",
    ATTENTION: "temporary", TEMPORARIES: "temporary",
}  # fmt: skip
_BY_KIND = {
    "gradient": GRADIENTS, "saved activation": ACTIVATIONS, "weight copy": WEIGHT_COPIES,
    "collective": COLLECTIVES, "output": RESULTS,
}  # fmt: skip
_BY_ROOT = {"params": PARAMETERS, "opt_state": OPTIMIZER, "step": OPTIMIZER, "batch": BATCH}
_HEADS = {"head", "lm_head", "unembed", "logits", "loss", "cross_entropy"}
_TABLE, _HEAD = re.compile(r"params/(.*/)?embedding/"), re.compile(r"params/(.*/)?head/")
_LARGEST, _LEAST_LOST = 15, 2**16
# libtpu 0.0.42 (jax 0.10) puts temporaries where results will be, 0.0.50 (jax 0.12) does not.
_OUTPUTS_APART = (0, 0, 50)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A buffer that is live at the peak.

    Attributes:
      bytes: that it takes, padding included.
      lost_bytes: of them, padding to whole tiles.
      dtype: `bf16`, ...
      dims: of one device's part.
      part: which of `PARTS` it belongs to.
      phase: forward, backward, or other.
      path: of its module; of parameters and their like, the parameter's.
      source: `file:line` that makes it, or "".
    """

    bytes: int
    lost_bytes: int
    dtype: str
    dims: tuple[int, ...]
    part: str
    phase: str
    path: str
    source: str

    @property
    def array(self) -> str:
        """`bf16[24,4,2048,2048]`."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def words(self) -> str:
        """`384 MiB bf16[24,4,2048,2048] saved activation, decoder/mlp, forward, model.py:120`."""
        known = self.part not in (PARAMETERS, OPTIMIZER, BATCH, RESULTS)
        phase = self.phase if known and self.phase != "other" else ""
        details = (self.path, phase, self.source.rpartition("/")[2])
        named = f"{amount(self.bytes)} {self.array} {_ONE.get(self.part, self.part)}"
        return ", ".join([named, *filter(None, details)])


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory of one device, explained. Bytes; none of them counts code but `code_bytes`.

    Attributes:
      hbm_bytes: the compiler's total.
      parts: of `hbm_bytes`, by `PARTS`: at the peak, each without its padding, which is a part
        itself. They add up to `hbm_bytes`; the last, `UNEXPLAINED`, may be negative.
      code_bytes: the program, which the compiler's total leaves out: the device holds it beside.
      host_bytes: pinned host memory of the program, for one device.
      peak_bytes: of the live-range walk.
      peak_at: in words, when that is: `backward, decoder/layers/attention, in decoder/layers x 24`.
      largest: live at the peak, the largest first.
      padded: live at the peak, that lose more than 10% to tiles: those that lose most first.
      versions: of jax, jaxlib and libtpu.
      timeline: memory over the schedule; not in JSON.
    """

    hbm_bytes: int
    parts: dict[str, int]
    code_bytes: int
    host_bytes: int
    peak_bytes: int
    peak_at: str
    largest: tuple[Tensor, ...]
    padded: tuple[Tensor, ...]
    versions: dict[str, str]
    timeline: Timeline = dataclasses.field(repr=False)

    @property
    def unexplained_fraction(self) -> float:
        """What the walk does not explain, of the compiler's total; negative where it has more."""
        return self.parts[UNEXPLAINED] / self.hbm_bytes if self.hbm_bytes else 0.0

    def to_json(self) -> dict:
        """Everything but the timeline, as JSON values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["timeline"]
        tensors = lambda found: [dataclasses.asdict(t) | {"words": t.words} for t in found]  # noqa: E731
        return fields | {
            "unexplained_fraction": self.unexplained_fraction,
            "largest": tensors(self.largest),
            "padded": tensors(self.padded),
        }


def explain_memory(result: CompileResult) -> MemoryReport:
    """What the memory of a compiled program is for.

    Args:
      result: of a program that fits.

    Raises:
      OSError: its HLO is gone from the cache.
    """
    libtpu = tuple(int(part) for part in re.findall(r"\d+", result.versions["libtpu"])[:3])
    module = parse_hlo(read_hlo(result))
    made = timeline(module, outputs_reused=libtpu < _OUTPUTS_APART)
    return MemoryReport(
        hbm_bytes=result.hbm_bytes,
        parts=breakdown(made, result.hbm_bytes, result.peak_bytes),
        code_bytes=result.code_bytes,
        host_bytes=result.host_bytes,
        peak_bytes=made.peak_bytes,
        peak_at=moment(made, made.events[made.peak_index]),
        largest=largest(made, _LARGEST),
        padded=padded(made),
        versions=dict(result.versions),
        timeline=made,
    )


def breakdown(made: Timeline, hbm_bytes: int, peak_bytes: int) -> dict[str, int]:
    """The parts of `hbm_bytes`, by `PARTS`; those that are nothing are 0.

    Args:
      made: of the program; its code is left out, as it is of `hbm_bytes`.
      hbm_bytes: the compiler's total.
      peak_bytes: of them, what the compiler has live at the peak.
    """
    parts = Counter(dict.fromkeys(PARTS, 0))
    for tensor in _tensors(made):
        parts[tensor.part] += tensor.bytes - tensor.lost_bytes
        parts[PADDING] += tensor.lost_bytes
    parts[HOLES] = hbm_bytes - peak_bytes
    parts[UNEXPLAINED] = hbm_bytes - sum(parts.values())
    return dict(parts)


def largest(made: Timeline, number: int) -> tuple[Tensor, ...]:
    """So many of the tensors that are live at the peak, the largest first."""
    return tuple(_tensors(made)[:number])


def padded(made: Timeline) -> tuple[Tensor, ...]:
    """Tensors, live at the peak, that lose more than 10% of their memory to whole tiles.

    Those that lose most come first; those that lose less than 64 KiB are left out.
    """
    losing = [t for t in _tensors(made) if t.lost_bytes > max(t.bytes / 10, _LEAST_LOST)]
    return tuple(sorted(losing, key=lambda tensor: -tensor.lost_bytes))


def moment(made: Timeline, event: Event) -> str:
    """When an event is, in words: its pass, its module, the loops around it."""
    around = [loop_words(made, loop) for loop in made.loops if loop.instruction in event.loops]
    where = f"in {' in '.join(reversed(around))}" if around else ""
    passed = event.phase if event.phase != "other" else ""
    return ", ".join(filter(None, (passed, event.path or event.instruction, where)))


def loop_words(made: Timeline, loop: Loop) -> str:
    """`decoder/layers x 24`: the module that runs in a loop, and how often."""
    inside = made.events[loop.first : loop.last + 1]
    deeper = [event.path.split("/") for event in inside if event.path.startswith(loop.path + "/")]
    shared = os.path.commonprefix(deeper) if loop.path and deeper else []
    name = "/".join(shared) or loop.path
    if not name and {"forward", "backward"} <= {event.phase for event in inside}:
        name = "microbatches"
    return f"{name or 'loop'} x {loop.trips or '?'}"


def amount(size: float) -> str:
    """Bytes in three digits or so: `384 MiB`, `1.5 GiB`, `12.3 KiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            digits = max(0, 2 - int(math.log10(abs(size) / unit)))
            number = f"{size / unit:.{digits}f}"
            return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {name}"
    return f"{size:.0f} B"


def _tensors(made: Timeline) -> list[Tensor]:
    """What is live at the peak, the largest first, without the code."""
    buffers = [buffer for buffer in made.peak_buffers if buffer.kind != "code"]
    vocabulary = _vocabulary(buffers)
    return [
        Tensor(
            bytes=buffer.bytes,
            lost_bytes=buffer.bytes - buffer.untiled_bytes,
            dtype=buffer.dtype,
            dims=buffer.dims,
            part=_part(buffer, vocabulary),
            phase=buffer.phase,
            path=re.sub("^params/", "", buffer.path),
            source=buffer.source,
        )
        for buffer in buffers
    ]


def _part(buffer: Buffer, vocabulary: set[int]) -> str:
    """Which of `PARTS` a buffer belongs to."""
    root = buffer.path.partition("/")[0]
    if buffer.kind == "parameter" or buffer.kind == "weight copy" and root != "params":
        return _BY_ROOT.get(root, PARAMETERS)  # a copy of the optimizer's state is that state
    if buffer.kind in ("gradient", "weight copy", "output"):
        return _BY_KIND[buffer.kind]
    if _is_logits(buffer, vocabulary):
        return LOGITS
    if buffer.kind == "temporary" and "attention" in buffer.path.split("/"):
        return ATTENTION
    return _BY_KIND.get(buffer.kind, TEMPORARIES)


def _vocabulary(buffers: list[Buffer]) -> set[int]:
    """Sizes of a device's part of the vocabulary, as its embedding and its head have them."""
    named = [b for b in buffers if b.kind == "parameter" and len(b.dims) == 2]
    tables = {b.dims[0] for b in named if _TABLE.match(b.path)}
    return tables | {b.dims[1] for b in named if _HEAD.match(b.path)}


def _is_logits(buffer: Buffer, vocabulary: set[int]) -> bool:
    """Whether a buffer is as wide as the vocabulary, or the loss makes it, outside any module.

    The table's own gradient is as wide, but its scatter says what it is.
    """
    modules = set(buffer.path.split("/")) - {""}
    if set(buffer.dims) & vocabulary and "scatter" not in buffer.op_name:
        return not modules or bool(modules & (_HEADS | {"embedding"}))
    return not modules and buffer.phase in ("forward", "backward")
