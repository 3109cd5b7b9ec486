"""A Flax module of anyone's as a `Model`: how it is called, and how its parameters are divided."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.errors import ConfigError
from jaxtpu.models import Model
from jaxtpu.paths import flatten, map_with_path
from jaxtpu.sharding import Rules, Undivided, parameter_shardings

# What modules call their training mode, and which value is for training.
_MODES = {"training": True, "train": True, "is_training": True, "deterministic": False,
          "use_running_average": False}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class UserModel(Model):
    """A model whose module was written without this project in mind.

    Attributes:
      call: (params, state, inputs, training) -> (outputs, state).
    """

    call: Callable[..., tuple[Any, Any]] = None

    def apply_to(self, params, state, arrays, *, training: bool, **keywords):
        """See `Model.apply_to`."""
        del keywords
        return self.call(params, state, arrays, training)


def adapt(module: Any, inputs: Any, seed: int) -> tuple[UserModel, Any, Any]:
    """(model, parameters, state) of a module; the state is None where it keeps none.

    Args:
      module: of Flax NNX, with its parameters, or of Linen.
      inputs: abstract arrays of a batch, for Linen, which makes its parameters from them.

    Raises:
      ConfigError: it is neither, or has no parameters.
    """
    if isinstance(module, nnx.Module):
        found = _of_nnx(module)
    elif isinstance(module, linen.Module):
        found = _of_linen(module, inputs, seed)
    else:
        raise ConfigError(
            "model", type(module).__name__, "is not a Flax module.",
            "Give an instance of a flax.nnx.Module, such as nnx.Linear(4, 2, rngs=nnx.Rngs(0)), or "
            "of a flax.linen.Module.",
        )  # fmt: skip
    if not jax.tree.leaves(found[1]):
        raise ConfigError("model", type(module).__name__, "has no parameters.", "Add a layer.")
    return found


def _mode(call: Callable) -> dict[str, bool]:
    """The keyword arguments of `call` that say whether it is training, as they are in training."""
    return {name: on for name, on in _MODES.items() if name in inspect.signature(call).parameters}


def _as_model(params: Any, state: Any, call: Callable, axes: dict) -> tuple[UserModel, Any, Any]:
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    model = UserModel(
        graph=None,
        abstract_params=jax.tree.map(shape, params),
        axes=axes,
        computed=frozenset(),
        compute=jnp.float32,
        init=lambda key: params,
        vocab_size=0,
        flops_per_token=0.0,
        task="classification",
        init_state=lambda: state,
        call=call,
    )
    return model, params, state


def _of_nnx(module: nnx.Module) -> tuple[UserModel, Any, Any]:
    params, state = (
        nnx.to_pure_dict(nnx.state(module, which)) for which in (nnx.Param, nnx.Not(nnx.Param))
    )
    graphs = {}
    module.eval()
    graphs[False] = nnx.graphdef(module)
    module.train()
    graphs[True] = nnx.graphdef(module)
    mode, keeps = _mode(module.__call__), bool(jax.tree.leaves(state))

    def call(params, state, inputs, training):
        made = nnx.merge(graphs[training], params, *((state,) if keeps else ()))
        outputs = made(inputs, **{name: on == training for name, on in mode.items()})
        after = nnx.to_pure_dict(nnx.state(made, nnx.Not(nnx.Param))) if keeps else None
        return outputs, after

    flat = {
        "/".join(map(str, path)): leaf
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    axes = {path: leaf.get_metadata().get("axes") for path, leaf in flat.items()}
    named = all(axes.values()) and axes
    return _as_model(params, state if keeps else None, call, axes if named else {})


def _of_linen(module: linen.Module, inputs: Any, seed: int) -> tuple[UserModel, Any, Any]:
    mode = _mode(type(module).__call__)
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(seed)), strict=True))

    def initialise():
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
        off = {name: not on for name, on in mode.items()}
        return linen.meta.unbox(module.init(keys, zeros, **off))

    variables = jax.jit(initialise)()
    params = variables.pop("params", {})
    state = {"collections": variables, "calls": jnp.zeros((), jnp.int32)}

    def call(params, state, inputs, training):
        kept, key = state["collections"], jax.random.fold_in(keys["dropout"], state["calls"])
        outputs, after = module.apply(
            {"params": params, **kept}, inputs, mutable=list(kept) if training else False,
            rngs={"dropout": key}, **{name: on == training for name, on in mode.items()},
        ) if training else (module.apply(
            {"params": params, **kept}, inputs, **{name: not on for name, on in mode.items()}
        ), kept)  # fmt: skip
        return outputs, {"collections": after, "calls": state["calls"] + training}

    return _as_model(params, state, call, {})


def divide(model: Model, rules: Rules) -> tuple[Any, list[Undivided], str]:
    """(shardings of the parameters, what is not divided as a rule says, a line for the table).

    Where the module names the axes of its parameters, the rule table divides them. Otherwise each
    is divided over `fsdp` along its largest dimension that `fsdp` divides.

    Raises:
      ConfigError: the mesh has other axes for parameters, and the module names no axes.
    """
    if model.axes:
        shardings, notes = parameter_shardings(rules, model.axes, model.abstract_params)
        return shardings, notes, "by the names of the model's axes"
    for axis in ("tensor", "expert", "context"):
        if rules.mesh.shape[axis] > 1:
            raise ConfigError(
                f"mesh.{axis}", rules.mesh.shape[axis],
                "the model names no axes, so its parameters are divided over fsdp only.",
                f"Use {axis}=1 and a larger fsdp or data.",
            )  # fmt: skip
    parts, whole = rules.mesh.shape["fsdp"], {}

    def one(path: str, leaf) -> NamedSharding:
        fits = [dim for dim, size in enumerate(leaf.shape) if size % parts == 0 and size]
        if parts == 1 or not fits:
            whole[path] = leaf
            return NamedSharding(rules.mesh, P())
        longest = max(fits, key=lambda dim: leaf.shape[dim])
        return NamedSharding(
            rules.mesh, P(*("fsdp" if d == longest else None for d in range(leaf.ndim)))
        )

    shardings = map_with_path(one, model.abstract_params)
    return shardings, [], _words(model, parts, whole)


def _words(model: Model, parts: int, whole: dict[str, Any]) -> str:
    if parts == 1:
        return "whole on every device: fsdp=1"
    leaves = flatten(model.abstract_params)
    size = lambda some: sum(leaf.size * leaf.dtype.itemsize for leaf in some.values())  # noqa: E731
    line = (
        f"by shape, the model names no axes: {len(leaves) - len(whole)} of {len(leaves)} parameters "
        f"({1 - size(whole) / size(leaves):.1%} of the bytes) along their largest dimension that "
        f"fsdp={parts} divides"
    )
    if whole:
        largest = sorted(whole, key=lambda path: whole[path].size, reverse=True)[:3]
        line += "; whole on every device: " + ", ".join(
            f"{path} {tuple(whole[path].shape)}" for path in largest
        )
        line += f" and {len(whole) - 3} more" if len(whole) > 3 else ""
    return line
