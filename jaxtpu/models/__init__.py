"""The registry of models: a new model is one file here, one line below, and one config."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxtpu.config import ModelConfig
from jaxtpu.errors import ConfigError, nearest
from jaxtpu.models import mixer, mlp, resnet, transformer, vit
from jaxtpu.paths import flatten, map_with_path
from jaxtpu.precision import Precision


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """What the trainer needs of a model.

    Attributes:
      build: (config, precision, rngs) -> a Flax NNX module that maps a batch to logits, has
        `features_and_head`, what they are a product of, and whose `nnx.Param`s carry `axes`, the
        logical name of each dimension, and `computed=True` where all that it does with them starts
        with a cast to the dtype of computations.
      flops_per_token: (config, sequence_length) -> training FLOPs a token (of a vision model, an
        image), no recomputation.
      task: what it learns: a name in `jaxtpu.train.task.TASKS`.
    """

    build: Callable[..., nnx.Module]
    flops_per_token: Callable[[ModelConfig, int], float]
    task: str = "next_token"


MODELS = {
    "transformer": ModelFamily(transformer.Transformer, transformer.flops_per_token),
    "vit": ModelFamily(vit.ViT, vit.flops_per_image, "classification"),
    "resnet": ModelFamily(resnet.ResNet, resnet.flops_per_image, "classification"),
    "mixer": ModelFamily(mixer.Mixer, mixer.flops_per_image, "classification"),
    "mlp": ModelFamily(mlp.MLP, mlp.flops_per_image, "classification"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its parameters.

    Attributes:
      graph: NNX graph definition; `apply` joins it with parameters.
      abstract_params: nested dict of `jax.ShapeDtypeStruct`.
      axes: logical axes of each parameter, by path.
      computed: paths of the parameters that are cast to `compute` before they are used.
      compute: dtype of activations and matrix products.
      init: key -> nested dict of parameters.
      vocab_size: ids; logits from here on only pad the vocabulary.
      flops_per_token: training FLOPs a token (of a vision model, an image), without recomputation.
      task: what it learns: a name in `jaxtpu.train.task.TASKS`.
      init_state: () -> what it keeps besides parameters, a nested dict; None if it keeps nothing.
    """

    graph: Any
    abstract_params: Any
    axes: dict[str, tuple[str | None, ...]]
    computed: frozenset[str]
    compute: DTypeLike
    init: Callable[[jax.Array], Any]
    vocab_size: int
    flops_per_token: float
    task: str = "next_token"
    init_state: Callable[[], Any] = lambda: None

    def cast(self, params: Any) -> Any:
        """The parameters as they are computed with: a gradient with respect to these takes half the
        memory of float32, and has the same values, for it passes through them."""

        def one(path: str, leaf: jax.Array) -> jax.Array:
            return leaf.astype(self.compute) if path in self.computed else leaf

        return map_with_path(one, params)

    def apply(self, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        """Logits of `batch`."""
        return nnx.merge(self.graph, params)(batch)

    def apply_to(
        self, params: Any, state: Any, arrays: Any, *, training: bool, **keywords: Any
    ) -> tuple[Any, Any]:
        """(what the module makes of `arrays`, its state afterwards or None).

        Args:
          state: the model's own state; None without one.
          training: whether batch statistics are taken from this batch, and kept in the state.
          keywords: of the module's call.
        """
        module = nnx.merge(self.graph, params, *(() if state is None else (state,)))
        outputs = module(arrays, training=training, **keywords)
        if state is None:
            return outputs, None
        return outputs, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    def features_and_head(
        self, params: Any, batch: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """What the logits of `batch` are a product of: [B, T, E], and weights [E, V]."""
        return nnx.merge(self.graph, params).features_and_head(batch)


def make_model(config: ModelConfig, precision: Precision, sequence_length: int) -> Model:
    """The model that `config.name` names; no array is made."""
    if config.name not in MODELS:
        raise ConfigError(
            "model.name", config.name, "is not a known model.", nearest(config.name, MODELS)
        )
    family = MODELS[config.name]

    def build(key: jax.Array) -> nnx.Module:
        return family.build(config, precision, rngs=nnx.Rngs(params=key))

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

    def init_state() -> Any:  # running averages start from constants
        return nnx.to_pure_dict(nnx.state(build(jax.random.key(0)), nnx.Not(nnx.Param)))

    graph, state, kept = nnx.split(
        nnx.eval_shape(build, jax.random.key(0)), nnx.Param, nnx.Not(nnx.Param)
    )
    variables = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    axes = {path: variable.axes for path, variable in variables.items()}
    computed = frozenset(path for path, v in variables.items() if v.get_metadata().get("computed"))
    abstract_params = jax.eval_shape(init, jax.random.key(0))
    assert flatten(abstract_params).keys() == axes.keys()
    flops_per_token = family.flops_per_token(config, sequence_length)
    return Model(
        graph,
        abstract_params,
        axes,
        computed,
        precision.compute,
        init,
        config.vocab_size,
        flops_per_token,
        family.task,
        init_state if nnx.to_flat_state(kept) else lambda: None,
    )
