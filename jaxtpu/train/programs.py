"""The compiled programs of one configuration on one mesh: init, train step, evaluation step."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.config import Config, RunUnits
from jaxtpu.data.batch import batch_spec
from jaxtpu.hardware import generation_of
from jaxtpu.mesh import has_host_memory
from jaxtpu.models import Model, make_model
from jaxtpu.optimizer import make_optimizer
from jaxtpu.precision import make_precision
from jaxtpu.sharding import (
    Rules,
    Undivided,
    check_divided,
    like_parameters,
    make_rules,
    on_host,
    parameter_shardings,
    row_parts,
)
from jaxtpu.train.step import (
    PerToken,
    TrainState,
    in_microbatches,
    make_batch_sums,
    make_init,
    make_train_step,
)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions with the abstract arguments that they compile from.

    `programs.train_step.lower(programs.abstract_state, programs.abstract_batch).compile()` needs
    no array and no device: that is what the planner does.

    Attributes:
      mesh: devices.
      rules: sharding rules on the mesh.
      model: the model without parameters.
      init: () -> state, created already divided.
      train_step: (state, batch) -> (state, metrics); the state is donated.
      eval_step: (params, batch) -> sums over real tokens.
      abstract_state: `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
      abstract_batch: dict of `jax.ShapeDtypeStruct`s with shardings.
      undivided: dimensions that their mesh axis does not divide.
    """

    mesh: Mesh
    rules: Rules
    model: Model
    init: Any
    train_step: Any
    eval_step: Any
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    undivided: list[Undivided]

    @property
    def batch_sharding(self) -> NamedSharding:
        return self.abstract_batch["inputs"].sharding


def build_programs(config: Config, mesh: Mesh, units: RunUnits) -> Programs:
    """Everything derived from the config and the mesh; nothing is compiled or allocated yet.

    Args:
      config: finalized.
      mesh: real, emulated or compile-only devices.
      units: length of the run.

    Raises:
      ConfigError: the model is unknown, or too much of it would be replicated.
    """
    precision = make_precision(config.precision)
    rules = make_rules(config.sharding, mesh)
    model = make_model(config.model, precision, config.data.sequence_length)
    shardings, undivided = parameter_shardings(rules, model.axes, model.abstract_params)
    check_divided(
        rules, model.axes, model.abstract_params, shardings, config.sharding.max_replicated
    )

    moved, rows = has_host_memory(mesh), row_parts(shardings)
    optimizer = make_optimizer(
        config.optimizer, units, model.abstract_params, axes=model.axes, divided=rows, moved=moved
    )
    init = make_init(model, optimizer, config.seed)
    replicas = _replicas(config, rules)
    train_sums, eval_sums = _sums(config, model, rules, replicas)
    microbatches = config.train.microbatches
    step = make_train_step(
        model.cast, train_sums, optimizer, shardings, microbatches, precision.accumulate, replicas
    )
    shapes = jax.eval_shape(init)
    replicated = NamedSharding(mesh, P())
    kept = like_parameters(shapes.opt_state, model.abstract_params, shardings, mesh)
    kept = on_host(kept, optimizer.on_host(shapes.opt_state)) if moved else kept
    state_shardings = TrainState(replicated, shardings, kept)
    abstract_batch = _abstract_batch(config, rules)
    batch_shardings = {name: leaf.sharding for name, leaf in abstract_batch.items()}
    options = _compiler_options(mesh)
    return Programs(
        mesh=mesh,
        rules=rules,
        model=model,
        init=jax.jit(init, out_shardings=state_shardings, compiler_options=options),
        train_step=jax.jit(
            step,
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
            compiler_options=options,
        ),
        eval_step=jax.jit(
            in_microbatches(eval_sums, microbatches),
            in_shardings=(shardings, batch_shardings),
            out_shardings=replicated,
            compiler_options=options,
        ),
        abstract_state=_with_shardings(shapes, state_shardings),
        abstract_batch=abstract_batch,
        undivided=undivided,
    )


def _sums(config: Config, model: Model, rules: Rules, replicas: int):
    """`make_batch_sums` of the train step and of evaluation: smoothing and z-loss shape the
    training, what is evaluated is the model."""
    options = {
        "vocab_size": model.vocab_size,
        "label_smoothing": config.label_smoothing,
        "z_loss": config.z_loss,
    }
    trained = PerToken(config.loss, config.metrics, tuple(options.items()))
    evaluated = PerToken(config.loss, config.metrics)
    train_rules = rules.mapped_over("data") if replicas > 1 else rules
    return (
        make_batch_sums(model, train_rules, trained, config.loss_chunk),
        make_batch_sums(model, rules, evaluated, config.loss_chunk),
    )


def _replicas(config: Config, rules: Rules) -> int:
    """Parts of the batch whose gradients are summed over microbatches apart from each other: those
    of the mesh axis `data`, where it is the outermost of the batch and divides nothing else."""
    divided = {name for name, axes in rules.table.items() if "data" in axes}
    if config.train.microbatches == 1 or divided != {"batch"} or rules.table["batch"][0] != "data":
        return 1
    return rules.mesh.shape["data"]


def _abstract_batch(config: Config, rules: Rules) -> dict[str, jax.ShapeDtypeStruct]:
    batch = batch_spec(config.data.batch_size, config.data.sequence_length)
    shardings = {
        name: NamedSharding(rules.mesh, rules.spec(("batch", "sequence"), leaf.shape))
        for name, leaf in batch.items()
    }
    return _with_shardings(batch, shardings)


def _compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, str] | None:
    """Of the generation that the mesh's devices are."""
    kind = "" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind
    generation = generation_of(kind)
    return dict(generation.compiler_options) if generation else None


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
