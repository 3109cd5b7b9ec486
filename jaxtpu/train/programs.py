"""The compiled programs of one configuration on one mesh: init, train step, evaluation step."""

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.config import Config, RunUnits
from jaxtpu.hardware import generation_of
from jaxtpu.mesh import has_host_memory
from jaxtpu.models import Model, make_model
from jaxtpu.optimizer import Optimizer, make_optimizer
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
from jaxtpu.train.step import TrainState, in_microbatches, make_gradient, make_init, make_train_step
from jaxtpu.train.task import TASKS


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
      init_from: parameters, which are donated -> state.
      gradient_of: (params, batch, model_state) -> (gradient, tokens, sums), a part of the step.
      train_step: (state, batch) -> (state, metrics); the state is donated.
      eval_step: (`state.evaluated()`, batch) -> sums over real tokens.
      abstract_state: `TrainState` of `jax.ShapeDtypeStruct`s with shardings.
      abstract_batch: dict of `jax.ShapeDtypeStruct`s with shardings.
      undivided: dimensions that their mesh axis does not divide.
    """

    mesh: Mesh
    rules: Rules
    model: Model
    init: Any
    init_from: Any
    gradient_of: Any
    train_step: Any
    eval_step: Any
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    undivided: list[Undivided]

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of the weights: how examples are divided."""
        return self.abstract_batch["weights"].sharding


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
    average = config.optimizer.average
    init = make_init(model, optimizer, config.seed, average > 0, guarded=True)
    replicas = 1 if jax.eval_shape(model.init_state) is not None else _replicas(config, rules)
    train_rules = rules.mapped_over("data") if replicas > 1 else rules
    task, microbatches = TASKS[model.task], config.train.microbatches
    eval_sums = task.batch_sums(config, model, rules, training=False)
    gradient_of = make_gradient(
        model.cast, task.batch_sums(config, model, train_rules, training=True), shardings,
        microbatches, precision.accumulate, replicas,
    )  # fmt: skip
    step = make_train_step(gradient_of, optimizer, average, config.guard)
    return jitted(
        model, rules, optimizer, shardings, init, gradient_of, step,
        in_microbatches(eval_sums, microbatches),
        abstract_batch=_with_shardings(*task.batch(config, rules)), undivided=undivided,
    )  # fmt: skip


def jitted(
    model: Model,
    rules: Rules,
    optimizer: Optimizer,
    shardings: Any,
    init: Any,
    gradient_of: Any,
    step: Any,
    eval_sums: Any,
    *,
    abstract_batch: dict[str, Any] | None,
    undivided: list[Undivided],
) -> Programs:
    """The functions of a run with the shardings of what they take and give.

    Args:
      shardings: of the parameters.
      init: () or (parameters) -> `TrainState`; step: (state, batch) -> (state, metrics), with the
        gradient that `gradient_of` gives.
      eval_sums: (params, batch) -> sums; for a model with a state of its own, that is the third.
      abstract_batch: with shardings; None where batches of several shapes bring theirs.
    """
    mesh = rules.mesh
    shapes, moved, options = jax.eval_shape(init), has_host_memory(mesh), _compiler_options(mesh)
    replicated = NamedSharding(mesh, P())
    kept = like_parameters(shapes.opt_state, model.abstract_params, shardings, mesh)
    kept = on_host(kept, optimizer.on_host(shapes.opt_state)) if moved else kept
    small = lambda tree: jax.tree.map(lambda _: replicated, tree)  # noqa: E731
    average = None if shapes.average is None else shardings
    state_shardings = TrainState(
        replicated, shardings, kept, small(shapes.model_state), average, small(shapes.guard)
    )
    batch_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_batch)
    return Programs(
        mesh=mesh,
        rules=rules,
        model=model,
        init=jax.jit(init, out_shardings=state_shardings, compiler_options=options),
        init_from=jax.jit(
            init,
            in_shardings=(shardings,),
            out_shardings=state_shardings,
            donate_argnums=0,
            compiler_options=options,
        ),
        gradient_of=jax.jit(
            gradient_of,
            in_shardings=(shardings, batch_shardings, state_shardings.model_state),
            out_shardings=(shardings, replicated, replicated),
            compiler_options=options,
        ),
        train_step=jax.jit(
            step,
            in_shardings=(state_shardings, batch_shardings),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
            compiler_options=options,
        ),
        eval_step=jax.jit(
            of_evaluated(eval_sums, shapes),
            in_shardings=(state_shardings.evaluated(), batch_shardings),
            out_shardings=replicated,
            compiler_options=options,
        ),
        abstract_state=_with_shardings(shapes, state_shardings),
        abstract_batch=abstract_batch,
        undivided=undivided,
    )


def of_evaluated(eval_sums, shapes: TrainState):
    """`eval_sums` as a function of what `TrainState.evaluated` gives, and the batch."""
    if shapes.model_state is None:
        return eval_sums
    return lambda variables, batch: eval_sums(variables[0], batch, variables[1])


def _replicas(config: Config, rules: Rules) -> int:
    """Parts of the batch whose gradients are summed over microbatches apart from each other: those
    of the mesh axis `data`, where it is the outermost of the batch and divides nothing else."""
    divided = {name for name, axes in rules.table.items() if "data" in axes}
    if config.train.microbatches == 1 or divided != {"batch"} or rules.table["batch"][0] != "data":
        return 1
    return rules.mesh.shape["data"]


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
