"""Memory and time by arithmetic: good enough to choose what to compile, always labelled so."""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxtpu.config import Config, RunUnits
from jaxtpu.config.validate import MESH_AXES
from jaxtpu.hardware import Slice
from jaxtpu.models import make_model
from jaxtpu.models.sizes import padded_mlp
from jaxtpu.observe.memory import tree_bytes_per_device
from jaxtpu.optimizer import make_optimizer
from jaxtpu.plan.candidates import Candidate
from jaxtpu.plan.compile_cache import DIRECTORY, program_fields, sources_key, write_whole
from jaxtpu.plan.progress import OnProgress
from jaxtpu.plan.roofline import (
    bytes_moved,
    communication_seconds,
    compute_seconds,
    exposed_share,
    host_seconds,
)
from jaxtpu.plan.trace import LocalCosts, local_costs
from jaxtpu.precision import make_precision
from jaxtpu.sharding import (
    Rules,
    check_divided,
    like_parameters,
    make_rules,
    parameter_shardings,
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """By arithmetic, for one device.

    Attributes:
      bytes_by_kind: HBM bytes: parameters, optimizer, gradients, saved activations, working set,
        gathered weights.
      host_bytes: of optimizer state in the host's memory.
      compute_seconds: matrix products of a step, recomputation included.
      communication_seconds: collectives of a step, none of them hidden.
      host_seconds: of moving that state to the device and back.
      seconds: of a step: compute, moves, and the share of communication that is not hidden.
      flops: of the matrix products of a step.
    """

    bytes_by_kind: dict[str, int]
    host_bytes: int
    compute_seconds: float
    communication_seconds: float
    host_seconds: float
    seconds: float
    flops: float

    @property
    def hbm_bytes(self) -> int:
        return sum(self.bytes_by_kind.values())


def check_mesh(config: Config, candidate: Candidate, units: RunUnits) -> None:
    """Fails where a run would refuse the candidate's mesh.

    Raises:
      ConfigError: the mesh leaves too much of the parameters undivided.
    """
    rules = make_rules(config.sharding, _mesh(candidate))
    model, _, _ = _shapes(_key(config), _Holder(config, units))
    shardings, _ = parameter_shardings(rules, model.axes, model.abstract_params)
    limit = config.sharding.max_replicated
    check_divided(rules, model.axes, model.abstract_params, shardings, limit)


def _mesh(candidate: Candidate) -> AbstractMesh:
    return AbstractMesh(candidate.mesh, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def estimates(
    config: Config,
    candidates: Sequence[Candidate],
    slice_: Slice,
    units: RunUnits,
    on_progress: OnProgress = lambda what, done, total: None,
) -> list[Estimate]:
    """The estimate of each candidate; kept on disk, for tracing hundreds of steps takes a while."""
    facts = [dataclasses.asdict(candidate) for candidate in candidates]
    key = sources_key(
        program_fields(config.to_dict()), facts, slice_.name, dataclasses.asdict(units)
    )
    path = pathlib.Path(DIRECTORY).expanduser() / f"estimates-{key}.json"
    try:
        kept = [Estimate(**values) for values in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        kept = []  # none, or a damaged file: made again
    if len(kept) == len(candidates):
        return kept
    found = []
    for candidate in candidates:
        found.append(estimate(config, candidate, slice_, units))
        on_progress("estimating", len(found), len(candidates))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([dataclasses.asdict(one) for one in found]).encode())
    return found


def estimate(config: Config, candidate: Candidate, slice_: Slice, units: RunUnits) -> Estimate:
    """The memory and the time of a step of `config` run as `candidate` says.

    Args:
      config: finalized.
      units: of the run; only the optimizer's schedule needs it.
    """
    config = candidate.apply(config)
    rules = make_rules(config.sharding, _mesh(candidate))
    state = _state(config, rules, units)
    costs = local_costs(config, rules, units)
    bytes_by_kind = _memory(config, candidate, state, costs)
    compute = compute_seconds(
        costs.operations,
        config.train.microbatches,
        state_bytes=state.param_bytes + state.optimizer_bytes + state.host_bytes,
        gradient_bytes=state.local_weights * make_precision(config.precision).accumulate.itemsize,
        saved_bytes=_saved_bytes(candidate, costs),
        generation=slice_.generation,
    )
    precision = make_precision(config.precision)
    moved = bytes_moved(config, candidate, state.weights, precision.compute.itemsize)
    flops = costs.flops * config.train.microbatches
    waiting = communication_seconds(moved, candidate, slice_)
    moving = host_seconds(state.host_bytes, slice_.generation)
    seconds = compute + moving + waiting * exposed_share(slice_.generation)
    return Estimate(bytes_by_kind, state.host_bytes, compute, waiting, moving, seconds, flops)


@dataclasses.dataclass(frozen=True)
class _State:
    """Sizes of the train state.

    Attributes:
      param_bytes, optimizer_bytes: of one device, in its HBM.
      host_bytes: optimizer state of one device in the memory of its host.
      weights: parameters of the whole model.
      local_weights: of one device.
    """

    param_bytes: int
    optimizer_bytes: int
    host_bytes: int
    weights: int
    local_weights: int


def _state(config: Config, rules: Rules, units: RunUnits) -> _State:
    model, opt_state, there = _shapes(_key(config), _Holder(config, units))
    shardings, _ = parameter_shardings(rules, model.axes, model.abstract_params)
    params = _sharded(model.abstract_params, shardings)
    moments = _sharded(
        opt_state, like_parameters(opt_state, model.abstract_params, shardings, rules.mesh)
    )
    leaves = jax.tree.leaves(params)
    moments, there = jax.tree.leaves(moments), jax.tree.leaves(there)
    on_host = [leaf for leaf, is_there in zip(moments, there, strict=True) if is_there]
    host_bytes = tree_bytes_per_device(on_host)
    return _State(
        tree_bytes_per_device(params),
        tree_bytes_per_device(moments) - host_bytes,
        host_bytes,
        sum(leaf.size for leaf in leaves),
        sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves),
    )


def _memory(
    config: Config, candidate: Candidate, state: _State, costs: LocalCosts
) -> dict[str, int]:
    """HBM bytes by kind, at the peak: in the backward pass over the layers, at the loss, or in an
    update that streams its state from the host."""
    precision = make_precision(config.precision)
    summed = config.train.microbatches > 1
    sums = summed * state.local_weights * precision.accumulate.itemsize
    # Of what is cast to compute with, the gradient is of that dtype too; what is cast to sum or to
    # update is cast on the way.
    gradients = state.local_weights * min(precision.params.itemsize, precision.compute.itemsize)
    held = {"parameters": state.param_bytes, "optimizer": state.optimizer_bytes}
    itemsize = precision.compute.itemsize
    casts = 0 if precision.params == precision.compute else state.local_weights * itemsize
    in_pass = {"saved activations": _saved_bytes(candidate, costs), "weight copies": casts}
    # Two layers of what is on the host: one that is updated, one that comes or goes.
    streamed = 2 * state.host_bytes // config.model.layers
    moments = (
        held
        | in_pass
        | {"weight copies": casts + _gathered(config, candidate) * itemsize}
        | {"gradients": sums + gradients, "working set": costs.layer_bytes},
        held | in_pass | {"gradients": sums, "working set": costs.loss_bytes},
        held | {"gradients": sums or gradients, "optimizer": state.optimizer_bytes + streamed},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def _saved_bytes(candidate: Candidate, costs: LocalCosts) -> int:
    """What the forward pass keeps for the backward one; of weights among it, a device's part."""
    return costs.saved_bytes + costs.saved_weight_bytes // candidate.sizes["fsdp"]


def _gathered(config: Config, candidate: Candidate) -> int:
    """Weights gathered along fsdp at the peak within a layer: those of its MLP."""
    parts = candidate.sizes["tensor"]
    mlp = padded_mlp(config.model)
    return 3 * config.model.embed * mlp // parts if candidate.sizes["fsdp"] > 1 else 0


@dataclasses.dataclass(frozen=True)
class _Holder:
    """Arguments that do not take part in a cache's key."""

    config: Config
    units: RunUnits

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)


def _key(config: Config) -> str:
    values = config.to_dict()
    values["model"] |= {"remat": "", "remat_group": 1, "attention": ""}  # they change no shape
    return repr([values[name] for name in ("model", "precision", "optimizer", "data")])


@functools.lru_cache(maxsize=8)
def _shapes(_key: str, held: _Holder):
    precision = make_precision(held.config.precision)
    model = make_model(held.config.model, precision, held.config.data.sequence_length)
    optimizer = make_optimizer(
        held.config.optimizer, held.units, model.abstract_params, axes=model.axes
    )
    opt_state = jax.eval_shape(optimizer.init, model.abstract_params)
    return model, opt_state, optimizer.on_host(opt_state)


def _sharded(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings
    )
