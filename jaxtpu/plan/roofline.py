"""The time of a step by arithmetic: enough to choose what to compile, never shown as a prediction."""

from collections.abc import Iterable

from jaxtpu.config import Config
from jaxtpu.hardware import Generation, Slice
from jaxtpu.plan.candidates import Candidate, crossing
from jaxtpu.plan.collectives import DCN_BYTES_PER_SECOND, LINK_EFFICIENCY
from jaxtpu.plan.jaxpr import Cost
from jaxtpu.plan.kernel_costs import efficiency
from jaxtpu.plan.playback import HOST_BYTES_PER_SECOND

# Shares of the peak rates that a large program reaches, the same for every generation; they set the
# scale of an estimate and hardly the order of candidates.
_MATMUL_EFFICIENCY = 0.9
_HBM_EFFICIENCY = 0.8
_SYNCHRONOUS = ("v2", "v3")  # their compiler schedules collectives that nothing runs beside


def compute_seconds(
    operations: Iterable[Cost],
    microbatches: int,
    *,
    state_bytes: int,
    gradient_bytes: int,
    saved_bytes: int,
    generation: Generation,
) -> float:
    """Seconds of compute in a step: each operation at the rate of its FLOPs or of its bytes.

    Args:
      operations: of one microbatch.
      state_bytes: parameters and optimizer state, which the update reads and writes.
      gradient_bytes: of all parameters; every microbatch but the first adds to them.
      saved_bytes: activations of a microbatch, stacked by its forward pass, read by its backward.
    """
    byte_seconds = 1 / generation.hbm_bandwidth / _HBM_EFFICIENCY
    compute = sum(
        op.count * max(op.flops * _flop_seconds(op, generation), op.bytes * byte_seconds)
        for op in operations
    )
    summing = 3 * gradient_bytes if microbatches > 1 else gradient_bytes
    pass_seconds = compute + (2 * saved_bytes + summing) * byte_seconds
    return microbatches * pass_seconds + (2 * state_bytes + gradient_bytes) * byte_seconds


def _flop_seconds(operation: Cost, generation: Generation) -> float:
    reached = _MATMUL_EFFICIENCY
    if operation.kernel:
        reached = efficiency(operation.kernel, generation)
    return 1 / generation.peak_flops_bf16 / reached


def host_seconds(state_bytes: int, generation: Generation) -> float:
    """Seconds to bring a device's state from the host and take it back.

    The devices of a chip share its link, and the two ways take turns in an update: a part's new
    state goes back before the next part comes.
    """
    return 2 * state_bytes * generation.devices_per_chip / HOST_BYTES_PER_SECOND


def exposed_share(generation: Generation) -> float:
    """The share of communication that compute does not hide, roughly."""
    return 1.0 if generation.name in _SYNCHRONOUS else 0.5


def bytes_moved(
    config: Config, candidate: Candidate, weights: int, itemsize: int
) -> dict[str, float]:
    """Bytes that a device receives in a step, by the mesh axis that they move along.

    Weights are gathered along fsdp in the forward pass, in the backward one, and their gradients
    reduced; gradients are reduced along data and context; activations along tensor, four times a
    layer, and as often again where they are recomputed; keys and values are gathered along context.
    """
    sizes, microbatches, model = candidate.sizes, config.train.microbatches, config.model
    part = weights / sizes["tensor"] * itemsize
    rows = config.data.batch_size / (sizes["data"] * sizes["fsdp"] * sizes["expert"])
    token_bytes = rows * config.data.sequence_length * itemsize
    grouped = 1 < model.remat_group < model.layers
    again = (model.remat not in ("none", "dots")) + grouped
    activation = token_bytes / sizes["context"] * model.embed
    keys = 2 * token_bytes * model.kv_heads * model.head_dim / sizes["tensor"]
    ring = lambda axis: (sizes[axis] - 1) / sizes[axis]  # noqa: E731
    reduced = 2 * part / sizes["fsdp"] * microbatches
    return {
        "data": reduced * ring("data"),
        "fsdp": (3 + grouped) * part * ring("fsdp") * microbatches,
        "context": (reduced + (2 + again) * model.layers * keys) * ring("context"),
        "tensor": 2 * (4 + 2 * again) * model.layers * activation * ring("tensor"),
    }


def communication_seconds(moved: dict[str, float], candidate: Candidate, slice_: Slice) -> float:
    """Seconds of the collectives of a step, none of them hidden.

    The outermost axes cross slices: what moves along them is held up by the data-centre network.
    """
    generation, seconds = slice_.generation, 0.0
    ici = generation.ici_link_bandwidth * generation.ici_links * LINK_EFFICIENCY
    dcn = generation.dcn_bandwidth or DCN_BYTES_PER_SECOND
    devices_of_host = generation.chips_per_host * generation.devices_per_chip
    for bytes_ in moved.values():
        seconds += bytes_ * generation.devices_per_chip / ici
    for axis, across in crossing(candidate.mesh, slice_.slices).items():
        bytes_ = moved.get(axis, 0.0)
        seconds += bytes_ / candidate.sizes[axis] * across * devices_of_host / dcn
    return seconds
