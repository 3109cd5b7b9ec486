"""What one device computes and keeps, read off the jaxpr of the very step that trains.

The step is traced with the shapes that one device has (its rows of a microbatch, its heads, its
part of the MLP and of the vocabulary), so sizes and FLOPs are local ones, recomputation included.
Only the sequence is whole, for attention sees all of it: what a mesh divides it into, costs are
divided by.
"""

import collections
import copy
import dataclasses
import functools
import json
import math

import jax

from jaxtpu.config import Config, ModelConfig, RunUnits
from jaxtpu.config.text import layer_pattern
from jaxtpu.mesh import make_mesh
from jaxtpu.models.sizes import padded_mlp, padded_vocabulary
from jaxtpu.plan.jaxpr import Cost, body, costs, results, scans, tiled_bytes, working_bytes
from jaxtpu.sharding import Rules
from jaxtpu.train.programs import build_programs

_TRACED = (
    "model",
    "data",
    "precision",
    "loss",
    "label_smoothing",
    "z_loss",
    "loss_chunk",
    "metrics",
)
_ONE_DEVICE = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


@dataclasses.dataclass(frozen=True)
class LocalCosts:
    """Of one device and one microbatch.

    Attributes:
      operations: matrix products, kernels, reductions; forward, backward and recomputation.
      saved_bytes: activations stacked by the forward scan for the backward one.
      saved_weight_bytes: copies of weights among them, as large as if fsdp were 1.
      layer_bytes: the most that is alive within one layer.
      loss_bytes: the most that is alive outside of the layers: a chunk of logits, and the gradient
        of the head's weights.
    """

    operations: tuple[Cost, ...]
    saved_bytes: int
    saved_weight_bytes: int
    layer_bytes: int
    loss_bytes: int

    @property
    def flops(self) -> float:
        """Of matrix products."""
        return sum(cost.count * cost.flops for cost in self.operations)

    def divided(self, parts: int) -> "LocalCosts":
        """Of one of equal parts of the sequence; copies of weights stay whole."""
        operations = tuple(
            Cost(c.count, c.flops / parts, c.bytes // parts) for c in self.operations
        )
        return LocalCosts(
            operations,
            self.saved_bytes // parts,
            self.saved_weight_bytes,
            self.layer_bytes // parts,
            self.loss_bytes // parts,
        )


def local_config(config: Config, rules: Rules) -> Config:
    """The configuration whose global shapes are what one device has of `config`'s."""
    parts = lambda axis: math.prod(rules.mesh.shape[a] for a in rules.mesh_axes(axis))  # noqa: E731
    divided = lambda axis, size: size // parts(axis) if size % parts(axis) == 0 else size  # noqa: E731
    local = copy.deepcopy(config)
    rows = config.data.batch_size // config.train.microbatches
    local.data.batch_size = divided("batch", rows)
    local.train.microbatches = 1
    model = local.model
    model.heads = divided("heads", config.model.heads)
    model.kv_heads = divided("kv_heads", config.model.kv_heads)
    if model.heads % model.kv_heads:
        model.kv_heads = model.heads  # each query head has its own copy of its key head
    model.mlp, model.mlp_multiple = divided("mlp", padded_mlp(config.model)), 1
    vocabulary = padded_vocabulary(config.model)
    model.vocab_size, model.vocab_multiple = divided("vocab", vocabulary), 1
    local.sharding.max_replicated = 1.0
    return local


def local_costs(config: Config, rules: Rules, units: RunUnits) -> LocalCosts:
    """Costs of one microbatch of `config` on one device of the mesh."""
    local = local_config(config, rules)
    divided_by = lambda axis: math.prod(rules.mesh.shape[a] for a in rules.mesh_axes(axis))  # noqa: E731
    parts, residual = divided_by("sequence"), divided_by("residual")
    apart = residual // parts if config.data.sequence_length % residual == 0 else 1
    key = json.dumps([local.to_dict()[name] for name in _TRACED])
    whole = _trace(key, apart, _Uncompared((local, units)))
    return whole.divided(parts) if parts > 1 else whole


@dataclasses.dataclass(frozen=True)
class _Uncompared:
    """An argument that does not take part in a cache's key."""

    value: tuple

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Uncompared)


@functools.lru_cache(maxsize=1024)
def _trace(_key: str, residual_parts: int, arguments: _Uncompared) -> LocalCosts:
    config, units = arguments.value
    programs = build_programs(config, make_mesh(_ONE_DEVICE, jax.devices()[:1]), units)
    jaxpr = programs.train_step.trace(programs.abstract_state, programs.abstract_batch).jaxpr.jaxpr
    stacked = {leaf.shape for leaf in jax.tree.leaves(programs.abstract_state.params)}
    stacked |= _in_groups(stacked, config.model)
    weights = stacked | {shape[1:] for shape in stacked} | {shape[2:] for shape in stacked}
    loss, others = [], []
    for scan in scans(jaxpr):
        (loss if _is_of_loss(scan) else others).append(scan)
    tokens = config.data.batch_size, config.data.sequence_length
    size = _StoredBytes((*tokens, config.model.embed), residual_parts)
    kept = [value.aval for scan in others for value in _kept(scan)]
    saved_weights = sum(size(array) for array in kept if array.shape in stacked)
    saved = sum(map(size, kept)) - saved_weights
    counted = collections.Counter()
    for cost in costs(jaxpr):
        counted[cost.flops, cost.bytes, cost.kernel] += cost.count
    return LocalCosts(
        operations=tuple(Cost(count, *rest) for rest, count in counted.items()),
        saved_bytes=saved,
        saved_weight_bytes=saved_weights,
        layer_bytes=max(_at_once(scan, weights, size) for scan in others),
        loss_bytes=working_bytes(jaxpr, weights)
        + sum(_carried(scan) + working_bytes(body(scan), weights) for scan in loss),
    )


@dataclasses.dataclass(frozen=True)
class _StoredBytes:
    """Bytes of what is kept from pass to pass.

    Attributes:
      residual: shape of the residual stream between layers.
      parts: that the mesh divides it into there, beyond what it divides everything into.
    """

    residual: tuple[int, int, int]
    parts: int

    def __call__(self, array) -> int:
        return tiled_bytes(array) // (self.parts if array.shape[-3:] == self.residual else 1)


def _in_groups(shapes: set[tuple[int, ...]], model: ModelConfig) -> set[tuple[int, ...]]:
    """Shapes of what is stacked over layers, as groups of layers take it: those whose kinds repeat,
    and those that are run again together."""
    period, found = len(layer_pattern(model)), set()
    stacked = [shape[1:] for shape in shapes if shape[:1] == (model.layers,)]
    inner = (period,) if period > 1 else ()
    if inner:
        found |= {(model.layers // period, period), (period,), (model.layers % period,)}
    layers, group = model.layers // period, max(1, model.remat_group // period)
    if 1 < group < layers:
        found |= {(layers // group, group, *inner), (group, *inner), (layers % group, *inner)}
    return {(*count, *shape) for shape in stacked for count in found}


def _kept(scan) -> list:
    """What a forward scan stacks for the backward one."""
    return [] if scan.params["reverse"] else results(scan)[1]


def _at_once(scan, weights: set[tuple[int, ...]], size: _StoredBytes) -> int:
    """The most bytes alive in a run of a scan's body: of a layer, or of a group of layers with what
    it keeps for its own backward pass."""
    inner = scans(body(scan))
    kept = [v.aval for s in inner for v in _kept(s) if v.aval.shape not in weights]
    within = max((_at_once(s, weights, size) for s in inner), default=0)
    return working_bytes(body(scan), weights) + sum(map(size, kept)) + within


def _is_of_loss(scan) -> bool:
    """Whether a scan is over the chunks of tokens, not over layers: its scope says so."""
    return "model/loss" in str(scan.source_info.name_stack)


def _carried(scan) -> int:
    """Bytes that a scan carries: over the tokens, the float32 gradient of the head."""
    return sum(tiled_bytes(value.aval) for value in results(scan)[0])
