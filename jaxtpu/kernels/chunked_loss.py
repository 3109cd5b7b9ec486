"""Sums over tokens of what their logits give, without ever holding the logits of all tokens.

Each device takes its own tokens chunk by chunk. A chunk's gradient is computed in the forward pass,
while its logits are there, and only scaled in the backward one (as in arXiv:2410.10989): nothing is
computed twice, and the logits of one chunk are all that is ever held. The head's weights are
gathered once, before the chunks; its gradient is summed over them in float32 on each device, and
reduced over devices once, after them. Where the vocabulary is large and the tokens are few, that
would be more than everything else: then the devices of `fsdp` divide the vocabulary, as those of
`tensor` do, and all of them take the tokens of each.

Dimensions: B batch, T positions, E features, V vocabulary (padded); of one device: N tokens of a
chunk, C chunks; P parts that the mesh divides all tokens into.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtpu.kernels.cross_entropy import logits_of, without_padding
from jaxtpu.kernels.scores import soft_capped
from jaxtpu.sharding import active_rules, constrain

# (logits_NV, targets_N) -> values of each token, float32 [N], by name; the gradient is that of
# `loss`.
PerToken = Callable[[jax.Array, jax.Array], dict[str, jax.Array]]
_CHUNK_BYTES = 256 * 2**20  # of float32 logits
_LANES = 128


def token_sums(
    per_token: PerToken,
    x_BTE: jax.Array,
    head_EV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    vocab_size: int,
    chunk: int = 0,
    soft_cap: float = 0.0,
) -> dict[str, jax.Array]:
    """Sums of `per_token` over the tokens, float32 scalars; a token counts as often as its weight.

    Only `loss` has a gradient, with respect to `x_BTE` and `head_EV`.

    Args:
      per_token: see `PerToken`; hashable.
      x_BTE: what the head is applied to.
      head_EV: the output projection.
      vocab_size: ids from here on only pad the vocabulary.
      chunk: tokens of a device at a time; 0 takes as many as have 256 MiB of float32 logits.
      soft_cap: of the logits, as in `logits_of`.
    """
    return _token_sums(
        (per_token, vocab_size, chunk, soft_cap), x_BTE, head_EV, targets_BT, weights_BT
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_sums(how, x_BTE, head_EV, targets_BT, weights_BT):
    return _run(how, False, x_BTE, head_EV, targets_BT, weights_BT)[0]


def _forward(how, x_BTE, head_EV, targets_BT, weights_BT):
    return _run(how, True, x_BTE, head_EV, targets_BT, weights_BT)


def _backward(how, gradients, d_sums):
    scaled = lambda g: (g * d_sums["loss"]).astype(g.dtype)  # noqa: E731
    return *map(scaled, gradients), None, None


_token_sums.defvjp(_forward, _backward)


def _run(how, with_gradients: bool, x_BTE, head_EV, targets_BT, weights_BT):
    """(sums, gradients of `loss` with respect to `x_BTE` and `head_EV`; () without)."""
    layout = _layout((*targets_BT.shape, head_EV.shape[1]))
    local = functools.partial(_on_one_device, *how, with_gradients, layout)
    x_BTE, targets_BT, weights_BT = map(layout.placed, (x_BTE, targets_BT, weights_BT))
    if not layout.axes:
        return local(x_BTE, head_EV, targets_BT, weights_BT)
    features, apart = P(*layout.tokens, None), P(layout.axes, None, None)
    sums, gradients = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(features, P(), layout.tokens, layout.tokens),
        out_specs=(P(), (features, apart) if with_gradients else ()),
        axis_names={*layout.axes, *layout.mapped},  # the partitioner divides the vocabulary
        check_vma=False,
    )(x_BTE, head_EV, targets_BT, weights_BT)
    if not with_gradients:
        return sums, ()
    d_x_BTE, d_head_PEV = gradients
    # In the number format of the weights: `jnp.sum` would reduce over devices in float32.
    d_head_EV = jax.lax.reduce(d_head_PEV, jnp.zeros((), head_EV.dtype), jax.lax.add, (0,))
    d_head_EV = constrain(d_head_EV, "embed", "vocab")
    # Together, or each device's own sum would be held until the layers' gradients are done.
    return sums, jax.lax.optimization_barrier((d_x_BTE, d_head_EV))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the arrays are divided.

    Attributes:
      mesh: None where there is one device.
      tokens: spec of [B, T].
      vocab: mesh axes of V, by which the partitioner divides whatever is as wide.
      vocab_parts: that they divide V into.
      mapped: mesh axes over which `jax.vmap` runs all of this.
    """

    mesh: Mesh | None = None
    tokens: P = P()
    vocab: tuple[str, ...] = ()
    vocab_parts: int = 1
    mapped: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide the tokens."""
        return tuple(axis for entry in self.tokens for axis in _names(entry))

    def placed(self, x_BT: jax.Array) -> jax.Array:
        """An array [B, T, ...], divided as `tokens` says."""
        if self.mesh is None:
            return x_BT
        return jax.lax.with_sharding_constraint(x_BT, NamedSharding(self.mesh, self.tokens))

    def divided(self, x: jax.Array) -> jax.Array:
        """An array [..., V], divided along V."""
        if not self.vocab:
            return x
        if not self.axes:
            return jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, P(None, self.vocab))
            )
        return _constrain_last(x, self.vocab)


def _constrain_last(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Within `shard_map`: divides the last dimension. `jax.vmap` would divide its own dimension by
    its `spmd_axis_name` here too, which `shard_map` has done."""
    spec = lambda x: P(*(None,) * (x.ndim - 1), axes)  # noqa: E731

    @jax.custom_batching.custom_vmap
    def constrained(x):
        return jax.lax.with_sharding_constraint(x, spec(x))

    constrained.def_vmap(lambda _size, _batched, x: (constrained(x), True))
    return constrained(x)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _layout(logits_shape: tuple[int, int, int]) -> _Layout:
    rules = active_rules()
    if rules is None or rules.mesh.size == 1:
        return _Layout()
    B, T, V = logits_shape
    batch, sequence, vocab = map(_names, rules.spec(("batch", "sequence", "vocab"), logits_shape))
    parts = lambda axes: math.prod(rules.mesh.shape[axis] for axis in axes)  # noqa: E731
    rest = tuple(axis for axis in batch if axis != "fsdp")
    tokens, own = B * T // parts((*rest, *sequence)), V // parts(vocab)
    if "fsdp" in batch and own % parts(["fsdp"]) == 0 and 2 * tokens <= own:
        batch, vocab = rest, (*vocab, "fsdp")
    spec = P(*(names or None for names in (batch, sequence)))
    return _Layout(rules.mesh, spec, vocab, parts(vocab), rules.mapped)


def _on_one_device(
    per_token, vocab_size, chunk, soft_cap, with_gradients, layout, x_BTE, head_EV, targets_BT,
    weights_BT,
):  # fmt: skip
    """`_run` on the tokens of a device."""
    head_EV = layout.divided(head_EV)
    tokens, (E, V) = targets_BT.size, head_EV.shape
    size = min(chunk, tokens) or automatic_chunk(tokens, V // layout.vocab_parts)

    def of_chunk(logits_NV, targets_N, weights_N):
        if soft_cap:  # here, as the gradient is taken with respect to the product itself
            logits_NV = without_padding(soft_capped(logits_NV, soft_cap), vocab_size)
        each = per_token(logits_NV, targets_N)
        sums = {name: jnp.sum(value_N * weights_N) for name, value_N in each.items()}
        return sums["loss"], sums

    def add_sums(totals, chunk):
        x_NE, *of_tokens = chunk
        logits_NV = layout.divided(logits_of(x_NE, head_EV, vocab_size))
        return jax.tree.map(jnp.add, totals, of_chunk(logits_NV, *of_tokens)[1]), None

    def add_sums_and_gradient(totals, chunk):
        x_NE, *of_tokens = chunk
        logits_NV = layout.divided(logits_of(x_NE, head_EV, vocab_size))
        d_logits_NV, sums = jax.grad(of_chunk, has_aux=True)(logits_NV, *of_tokens)
        d_logits_NV = layout.divided(d_logits_NV.astype(head_EV.dtype))
        d_head_EV = jnp.einsum("NE,NV->EV", x_NE, d_logits_NV, preferred_element_type=jnp.float32)
        made = sums, layout.divided(d_head_EV)
        return jax.tree.map(jnp.add, totals, made), d_logits_NV @ head_EV.T

    chunks = [_in_chunks(x, tokens, size) for x in (x_BTE, targets_BT, weights_BT)]
    shape = jax.ShapeDtypeStruct((1, V), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    sums = dict.fromkeys(jax.eval_shape(per_token, *shape), jnp.zeros(()))
    if not with_gradients:
        sums, _ = jax.lax.scan(add_sums, sums, chunks)
        return jax.lax.psum(sums, layout.axes), ()
    totals = sums, layout.divided(jnp.zeros((E, V)))
    (sums, d_head_EV), d_x_CNE = jax.lax.scan(add_sums_and_gradient, totals, chunks)
    d_x_BTE = d_x_CNE.reshape(-1, E)[:tokens].reshape(x_BTE.shape)
    d_head_EV = d_head_EV.astype(head_EV.dtype)
    own = d_head_EV[None] if layout.axes else d_head_EV
    return jax.lax.psum(sums, layout.axes), (d_x_BTE, own)


def automatic_chunk(tokens: int, vocabulary: int) -> int:
    """Tokens whose float32 logits are at most 256 MiB: what divides `tokens`, if that is half of
    what there is room for; else whole lanes, and the last chunk is padded."""
    most = max(1, _CHUNK_BYTES // (4 * vocabulary))
    if tokens <= most:
        return tokens
    divisor = next(n for n in range(most, 0, -1) if tokens % n == 0)
    return divisor if 2 * divisor >= most else max(most - most % _LANES, 1)


def _in_chunks(x_BT: jax.Array, tokens: int, size: int) -> jax.Array:
    """[B, T, ...] as [C, N, ...]; padding is zeros, and so has no weight."""
    x = x_BT.reshape(tokens, *x_BT.shape[2:])
    x = jnp.pad(x, [(0, -tokens % size), *[(0, 0)] * (x.ndim - 1)])
    return x.reshape(-1, size, *x.shape[1:])
