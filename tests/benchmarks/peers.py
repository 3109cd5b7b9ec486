"""The train step of configs/lm_1b.py beside a peer's for the same shapes, batch, mesh and optimizer.

    python -m tests.benchmarks.peers [v3-8 ...]

The peer is MaxText 0.2.5, its own step compiled by the TPU compiler without a TPU: jax 0.12.0.1,
libtpu 0.0.50.1; run this on the same pair. Both sides by one method: HBM is the compiler's total
with code; time is the compiler's cycles, and of Pallas kernels the least that the matrix units
need, where the compiler has none. What the peer waits for communication is not known: it counts as
nothing for the peer, and as it is predicted for us. Our own kernels, on v2 and v3 where the peer
has none, count as they were measured, not as the least.
"""

import dataclasses
import sys
from collections.abc import Sequence

from jaxtpu import environment
from jaxtpu.config import load
from jaxtpu.hardware import parse_slice
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, read_hlo
from jaxtpu.plan.hlo import parse_hlo
from jaxtpu.plan.timing import TimePrediction, predict_time

CONFIG, BUDGET_GIB, BAR = "configs/lm_1b.py", 8.0, 0.80
_BYTE_IDS = 257  # of the tokenizer
_CAUSAL_CHIPS = ("v5e", "v6e")  # where the peer has a kernel of attention


@dataclasses.dataclass(frozen=True)
class Peer:
    """A row of the peer's figures.

    Attributes:
      slice: name.
      mesh: sizes of its axes above 1.
      rows: sequences a device.
      policy: how the peer calls its rematerialisation.
      hbm_gib: of a device.
      cycles: millions, without Pallas kernels.
      kernel_cycles: the least that its Pallas kernels take, millions.
      moved_gb: bytes of its collectives, GB a device.
      note: what else was chosen.
    """

    slice: str
    mesh: dict[str, int]
    rows: int
    policy: str
    hbm_gib: float
    cycles: int
    kernel_cycles: int
    moved_gb: float
    note: str = ""

    @property
    def seconds(self) -> float:
        """Of compute: a lower bound of its step."""
        return (self.cycles + self.kernel_cycles) * 1e6 / clock(self.slice)


PEERS = (
    Peer("v2-8", {"fsdp": 8}, 1, "full", 3.56, 1093, 0, 7.68),
    Peer("v2-8", {"fsdp": 8}, 4, "full", 5.02, 4234, 0, 7.73),
    Peer("v3-8", {"fsdp": 8}, 1, "full", 3.56, 603, 0, 7.68),
    Peer("v3-8", {"fsdp": 8}, 1, "minimal", 5.25, 540, 0, 7.68),
    Peer("v3-8", {"fsdp": 8}, 4, "full", 5.08, 2264, 0, 7.73),
    Peer("v3-8", {"fsdp": 4, "tensor": 2}, 4, "full", 5.07, 2316, 0, 21.95),
    Peer("v3-32", {"fsdp": 32}, 4, "full", 3.03, 2264, 0, 7.73),
    Peer("v3-32", {"fsdp": 8, "tensor": 4}, 4, "full", 3.13, 2351, 0, 38.00),
    Peer("v5e-16", {"fsdp": 16}, 4, "full", 3.58, 1596, 86, 8.08),
    Peer("v5e-16", {"fsdp": 16}, 4, "full", 2.94, 859, 86, 7.73, "windowed einsum off"),
    Peer("v5e-16", {"fsdp": 4, "tensor": 4}, 4, "full", 4.19, 1176, 86, 41.32),
    Peer("v6e-8", {"fsdp": 8}, 4, "full", 4.81, 614, 22, 8.43),
    Peer("v6e-8", {"fsdp": 8}, 4, "full", 4.36, 349, 22, 7.78, "windowed einsum off"),
    Peer("v6e-8", {"fsdp": 4, "tensor": 2}, 4, "full", 5.00, 426, 22, 21.95),
)
# What ours is set to, by the generation: for little memory, and for speed within 8 GiB.
LEAN = {"model.remat": "full", "model.remat_group": "4"}
_GATE = {"model.remat": "save_attention_out", "model.remat_tensors": "mlp_gate=save"}
FAST = {
    "v2-8": _GATE,
    "v3-8": _GATE,
    "v3-32": {"model.remat": "save_attention", "model.remat_tensors": "mlp_gate=save"},
    "v5e-16": {
        "model.remat": "save_attention_out",
        "model.remat_tensors": "mlp_gate=save,query=save,key=save",
    },
    "v6e-8": {"model.remat": "save_attention"},
}


@dataclasses.dataclass(frozen=True)
class Ours:
    """A step of ours, compiled for a slice."""

    slice: str
    result: CompileResult

    @property
    def time(self) -> TimePrediction:
        return predict_time(parse_hlo(read_hlo(self.result)), parse_slice(self.slice))

    @property
    def hbm_gib(self) -> float:
        return (self.result.hbm_bytes + self.result.code_bytes) / 2**30

    @property
    def kernel_seconds(self) -> float:
        """As the peer's, where it has kernels; else as measured."""
        generation, time = parse_slice(self.slice).generation, self.time
        if generation.name in _CAUSAL_CHIPS:
            return time.kernel_flops / generation.peak_flops_bf16
        return time.kernel_seconds

    @property
    def seconds(self) -> float:
        """Of a step, by the method that the peer's are told by, and what it waits besides."""
        time = self.time
        return time.cycles / clock(self.slice) + self.kernel_seconds + time.exposed_seconds

    @property
    def moved_gb(self) -> float:
        return sum(size for _, size in self.time.communication.values()) / 1e9


def clock(slice_name: str) -> float:
    """Cycles a second."""
    return parse_slice(slice_name).generation.clock_hz


def request(slice_name: str, mesh: dict[str, int], rows: int, fields: dict) -> CompileRequest:
    """Our train step with the peer's mesh and batch."""
    devices = parse_slice(slice_name).devices
    data_parts = devices // mesh.get("tensor", 1)
    values = {f"mesh.{axis}": size for axis, size in mesh.items()} | fields
    values |= {"data.batch_size": rows * devices, "train.microbatches": 1}
    assert values["data.batch_size"] % data_parts == 0
    config = load(CONFIG, [(name, str(value)) for name, value in values.items()])
    budget = min(BUDGET_GIB, parse_slice(slice_name).generation.default_budget_gib)
    return CompileRequest(config.to_dict(), slice_name, budget, _BYTE_IDS)


def best_of_peer(slice_name: str) -> Peer:
    """The quickest setting of the peer within 8 GiB, 4 sequences a device."""
    within = [p for p in PEERS if p.slice == slice_name and p.rows == 4 and p.hbm_gib < BUDGET_GIB]
    return min(within, key=lambda peer: peer.seconds)


def main(slices: Sequence[str]) -> None:
    environment.prepare(1, platform="cpu")
    peers = [peer for peer in PEERS if not slices or peer.slice in slices]
    settings = [(peer, fields) for peer in peers for fields in (LEAN, FAST[peer.slice])]
    requests = [request(peer.slice, peer.mesh, peer.rows, fields) for peer, fields in settings]
    print(
        f"{'':44}{'HBM GiB':>17}{'M cycles':>13}{'kernels':>12}{'waits':>8}{'seconds':>15}{'moved GB':>15}"
    )
    shown = set()
    for (peer, fields), result in zip(settings, compile_all(requests), strict=True):
        if peer not in shown:
            shown.add(peer)
            print(_line(_words(peer, f"{peer.policy}, the peer's {peer.note}"), peer.hbm_gib,
                        peer.cycles, peer.kernel_cycles, None, peer.seconds, peer.moved_gb))  # fmt: skip
        print(_ours(peer, fields, result), flush=True)


def _words(peer: Peer, rest: str) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in peer.mesh.items())
    return f"{peer.slice} {mesh}, {peer.rows} a device, {rest.strip()}"


def _ours(peer: Peer, fields: dict, result: CompileResult) -> str:
    words = "  ours: " + ", ".join(str(value) for value in fields.values())
    if not result.fits:
        needed = f"{result.needed_bytes / 2**30:.2f} GiB" if result.needed_bytes else result.error
        return f"{words}: does not fit, {needed}"
    ours = Ours(peer.slice, result)
    kernels = ours.kernel_seconds * clock(peer.slice) / 1e6
    cycles, waits = ours.time.cycles / 1e6, ours.time.exposed_seconds
    line = _line(words, ours.hbm_gib, cycles, kernels, waits, ours.seconds, ours.moved_gb)
    ratios = ours.hbm_gib / peer.hbm_gib, ours.seconds / peer.seconds, ours.moved_gb / peer.moved_gb
    return f"{line}\n{'  ours / the peer':44}{ratios[0]:17.2f}{ratios[1]:48.2f}{ratios[2]:15.2f}"


def _line(words, hbm_gib, cycles, kernels, waits, seconds, moved) -> str:
    waited = f"{waits:8.3f}" if waits is not None else " unknown"
    start = f"{words}\n{'':44}" if len(words) > 43 else f"{words:44}"
    return (
        f"{start}{hbm_gib:17.2f}{cycles:13.0f}{kernels:12.0f}{waited}{seconds:15.3f}{moved:15.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
