"""The quickstart's train step written by hand: JAX and optax in one file, and nothing of jaxtpu.

It is the yardstick of `step.py`: what an engineer writes who needs this one model on this one mesh.
Dimensions: b batch, t and s positions, e embed, h query heads, k key heads, g = h / k, d features
of a head, f hidden features of the MLP, v padded vocabulary; layers are stacked along a first axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")
SPECS = {
    "embed": P("tensor", "fsdp"),
    "layers": {
        "attention_norm": P(),
        "q": P(None, "fsdp", "tensor", None),
        "k": P(None, "fsdp", "tensor", None),
        "v": P(None, "fsdp", "tensor", None),
        "o": P(None, "tensor", None, "fsdp"),
        "mlp_norm": P(),
        "gate": P(None, "fsdp", "tensor"),
        "up": P(None, "fsdp", "tensor"),
        "down": P(None, "tensor", "fsdp"),
    },
    "final_norm": P(),
    "head": P("fsdp", "tensor"),
}
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that the step depends on besides shapes."""

    vocab_size: int
    rope_theta: float
    norm_epsilon: float
    dtype: Any
    peak: float
    warmup: int
    steps: int
    final_fraction: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float


@dataclasses.dataclass(frozen=True)
class Step:
    """The jitted step (params, opt_state, batch) -> (params, opt_state, metrics) and what feeds it.

    The first two arguments are donated.
    """

    run: Any
    init_optimizer: Callable[[Any], Any]
    param_shardings: Any
    batch_sharding: NamedSharding


def rms_norm(x, scale, epsilon):
    x32 = x.astype(jnp.float32)
    normal = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normal * scale).astype(x.dtype)


def rope_angles(positions, head_dim, theta):
    """(sin, cos), each [b, t, 1, d / 2]: the same for all layers."""
    half = head_dim // 2
    angles = positions[..., None, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.sin(angles), jnp.cos(angles)


def rope(x, sin, cos):
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(q, k, v, mask):
    b, t, h, d = q.shape
    q = (q * d**-0.5).reshape(b, t, k.shape[2], -1, d)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(b, t, h, d)


def forward(params, batch, settings: Settings, shard):
    """Logits, float32 [b, t, v]."""
    weights = jax.tree.map(lambda w: w.astype(settings.dtype), params)  # once, for all layers
    scales = {name: params["layers"][name] for name in ("attention_norm", "mlp_norm")}
    positions, segments = batch["positions"], batch["segment_ids"]
    sin, cos = rope_angles(positions, params["layers"]["q"].shape[-1], settings.rope_theta)
    length = positions.shape[1]
    mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(length, dtype=bool)
    mask = mask[:, None, None]

    def layer(x, w):
        y = rms_norm(x, w["attention_norm"], settings.norm_epsilon)
        q = rope(shard(jnp.einsum("bte,ehd->bthd", y, w["q"]), BATCH, None, "tensor"), sin, cos)
        k = rope(shard(jnp.einsum("bte,ekd->btkd", y, w["k"]), BATCH, None, "tensor"), sin, cos)
        v = shard(jnp.einsum("bte,ekd->btkd", y, w["v"]), BATCH, None, "tensor")
        x = x + shard(jnp.einsum("bthd,hde->bte", attention(q, k, v, mask), w["o"]), BATCH)
        y = rms_norm(x, w["mlp_norm"], settings.norm_epsilon)
        hidden = jax.nn.silu(y @ w["gate"]) * (y @ w["up"])
        x = x + shard(shard(hidden, BATCH, None, "tensor") @ w["down"], BATCH)
        return x, None

    table = shard(weights["embed"])  # small: gathered whole, rather than its rows exchanged
    x = shard(table[batch["inputs"]], BATCH)
    x, _ = lax.scan(layer, x, weights["layers"] | scales)
    x = rms_norm(x, params["final_norm"], settings.norm_epsilon)
    logits = shard(x @ weights["head"], BATCH, None, "tensor").astype(jnp.float32)
    return jnp.where(jnp.arange(logits.shape[-1]) < settings.vocab_size, logits, MASKED)


def loss_and_accuracy(params, batch, settings: Settings, shard):
    logits = forward(params, batch, settings, shard)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    picked = jnp.sum(jnp.where(ids == batch["targets"][..., None], logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    hits = jnp.argmax(logits, axis=-1) == batch["targets"]
    tokens = jnp.sum(batch["weights"])

    def mean(values):
        return jnp.sum(values * batch["weights"]) / jnp.maximum(tokens, 1.0)

    return mean(losses), {"accuracy": mean(hits), "tokens": tokens}


def make_schedule(s: Settings):
    rise = lambda count: s.peak * (count + 1) / s.warmup  # noqa: E731
    fall = optax.cosine_decay_schedule(s.peak, s.steps - s.warmup, s.final_fraction)
    return optax.join_schedules([rise, fall], [s.warmup])


def make_optimizer(s: Settings, schedule):
    """AdamW, without decay of the norms' scales."""
    mask = jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), SPECS)
    adamw = optax.adamw(
        schedule, s.beta1, s.beta2, s.epsilon, weight_decay=s.weight_decay, mask=mask
    )
    return optax.chain(optax.clip_by_global_norm(s.clip_norm), adamw)


def make_step(mesh: Mesh, abstract_params: Any, settings: Settings) -> Step:
    """The step on a mesh with the axes data, fsdp and tensor."""
    schedule = make_schedule(settings)
    optimizer = make_optimizer(settings, schedule)
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    params_at = jax.tree.map(place, SPECS)
    state_at = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, abstract_params),
        params_at,
        transform_non_params=lambda _: place(P()),
    )

    def shard(x, *spec):
        return lax.with_sharding_constraint(x, place(P(*spec)))

    def step(params, opt_state, batch):
        grad = jax.value_and_grad(loss_and_accuracy, has_aux=True)
        (loss, metrics), gradient = grad(params, batch, settings, shard)
        gradient = lax.with_sharding_constraint(gradient, params_at)
        count = optax.tree.get(opt_state, "count", filtering=lambda path, _: "Adam" in str(path))
        metrics |= {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradient),
            "learning_rate": schedule(count),
        }
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    run = jax.jit(
        step,
        in_shardings=(params_at, state_at, place(P(BATCH))),
        out_shardings=(params_at, state_at, place(P())),
        donate_argnums=(0, 1),
    )
    init_optimizer = jax.jit(optimizer.init, out_shardings=state_at)
    return Step(run, init_optimizer, params_at, place(P(BATCH)))
