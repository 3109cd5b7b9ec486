"""What a family of models learns: its batch, and the sums over what counts in it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxtpu.config import Config
from jaxtpu.data.batch import batch_spec, image_batch_spec
from jaxtpu.kernels.chunked_loss import token_sums
from jaxtpu.kernels.cross_entropy import cross_entropy
from jaxtpu.models import Model
from jaxtpu.sharding import Rules

MODEL_STATE = "model_state"  # the entry of sums that holds a model's own state after the batch
_COUNTS = ("tokens", "examples")


def _accuracy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    if targets.ndim == logits.ndim:  # probabilities of the classes
        targets = jnp.argmax(targets, axis=-1)
    return jnp.argmax(logits, axis=-1) == targets


def _top_5(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Whether the target is among the five likeliest."""
    ids_V = jnp.arange(logits.shape[-1])
    if targets.ndim == logits.ndim:
        targets = jnp.argmax(targets, axis=-1)
    own = jnp.max(jnp.where(ids_V == targets[..., None], logits, -jnp.inf), axis=-1, keepdims=True)
    return jnp.sum(logits > own, axis=-1) < 5


LOSSES = {"cross_entropy": cross_entropy}
METRICS = {"accuracy": _accuracy, "top_5": _top_5}


@dataclasses.dataclass(frozen=True)
class Task:
    """A task, as far as the step must know.

    Attributes:
      batch_spec: config -> the arrays of a global batch, by name, without sharding. `weights` is
        among them: how often each token or example counts.
      axes: logical names of the first dimensions of each of those arrays; the rest is undivided.
      batch_sums: (config, model, rules, training=) -> the function (params, batch) -> sums over
        what counts: `loss`, each metric, and the sum of the weights under the name of what they
        count. For a model with a state of its own the function takes that as a third argument, and
        the sums have it, as it is after the batch, as `MODEL_STATE`.
    """

    batch_spec: Callable[[Config], dict[str, jax.ShapeDtypeStruct]]
    axes: dict[str, tuple[str, ...]]
    batch_sums: Callable[..., Callable[..., dict[str, Any]]]

    def batch(self, config: Config, rules: Rules) -> tuple[dict, dict[str, NamedSharding]]:
        """(the arrays of a batch, their shardings), each by name."""
        spec = self.batch_spec(config)

        def sharding(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            axes = self.axes[name][: leaf.ndim]
            axes += (None,) * (leaf.ndim - len(axes))
            return NamedSharding(rules.mesh, rules.spec(axes, leaf.shape))

        return spec, {name: sharding(name, leaf) for name, leaf in spec.items()}


def count_name(values: dict[str, Any]) -> str:
    """Which of sums or metrics is what the others are summed over: `tokens` or `examples`."""
    return next(name for name in _COUNTS if name in values)


@dataclasses.dataclass(frozen=True)
class PerToken:
    """(logits [..., V], targets [...]) -> the value of each token, float32 [...], by name.

    Attributes:
      loss: name in `LOSSES`; the value is called `loss`.
      metrics: names in `METRICS`.
      options: keyword arguments of the loss, as pairs.
    """

    loss: str
    metrics: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, logits: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
        values = {name: METRICS[name](logits, targets) for name in self.metrics}
        return {"loss": LOSSES[self.loss](logits, targets, **dict(self.options))} | values


def _per_token(config: Config, training: bool, size: int) -> PerToken:
    """Smoothing and z-loss shape the training; what is evaluated is the model."""
    options = {
        "vocab_size": size,
        "label_smoothing": config.label_smoothing,
        "z_loss": config.z_loss,
    }
    return PerToken(config.loss, config.metrics, tuple(options.items()) if training else ())


def _next_token_sums(config: Config, model: Model, rules: Rules, *, training: bool):
    per_token = _per_token(config, training, model.vocab_size)

    def batch_sums(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        weights_BT = batch["weights"]
        with rules.active():
            x_BTE, head_EV = model.features_and_head(params, batch)
            # As a part of the model: reports leave out the outermost name.
            with jax.named_scope("model/loss"):
                sums = token_sums(
                    per_token, x_BTE, head_EV, batch["targets"], weights_BT,
                    vocab_size=model.vocab_size, chunk=config.loss_chunk,
                    soft_cap=config.model.text.final_logit_softcapping,
                )  # fmt: skip
        return sums | {"tokens": jnp.sum(weights_BT)}

    return batch_sums


def weighted_sums(per_example, outputs: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums of `per_example(outputs, labels)`, each [B], over the examples as they count."""
    weights_B = batch["weights"]
    with jax.named_scope("model/loss"):
        each = per_example(outputs, batch["labels"])
        sums = {name: jnp.sum(value_B * weights_B) for name, value_B in each.items()}
    return sums | {"examples": jnp.sum(weights_B)}


def _classification_sums(config: Config, model: Model, rules: Rules, *, training: bool):
    per_example = _per_token(config, training, config.model.vision.classes)

    def batch_sums(params: Any, batch: dict[str, jax.Array], state: Any = None) -> dict[str, Any]:
        with rules.active():
            logits_BK, state = model.apply_to(
                params, state, batch["images"], training=training, weights_B=batch["weights"]
            )
            sums = weighted_sums(per_example, logits_BK, batch)
        return sums if state is None else sums | {MODEL_STATE: state}

    return batch_sums


_BY_TOKEN = ("inputs", "targets", "segment_ids", "positions", "weights")
TASKS = {
    "next_token": Task(
        lambda config: batch_spec(config.data.batch_size, config.data.sequence_length),
        dict.fromkeys(_BY_TOKEN, ("batch", "sequence")),
        _next_token_sums,
    ),
    "classification": Task(
        lambda config: image_batch_spec(
            config.data.batch_size, config.model.vision, soft_labels=config.images.mixup > 0
        ),
        dict.fromkeys(("images", "labels", "weights"), ("batch",)),
        _classification_sums,
    ),
}
