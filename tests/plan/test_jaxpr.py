import jax
import jax.numpy as jnp
import pytest

from jaxtpu.plan.jaxpr import costs, operations, tiled_bytes, working_bytes

F32 = jnp.float32


def jaxpr_of(fun, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    return jax.make_jaxpr(fun)(*arguments).jaxpr


def flops(jaxpr) -> float:
    return sum(cost.count * cost.flops for cost in costs(jaxpr))


def test_flops_count_each_product_as_often_as_it_runs():
    def looped(x, w):
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.dot)(x, w), None), x, None, length=5)[0]

    assert flops(jaxpr_of(looped, (8, 16), (16, 16))) == 5 * 2 * 8 * 16 * 16


def test_recomputation_is_counted():
    def loss(x, w):
        return jnp.sum(jnp.sin(x @ w) @ w)

    shapes = (8, 16), (16, 16)
    plain = flops(jaxpr_of(jax.grad(loss, 1), *shapes))
    again = flops(jaxpr_of(jax.grad(jax.checkpoint(loss), 1), *shapes))
    assert again > plain


def test_calls_are_inlined_with_the_values_outside():
    def fun(x):
        return jax.jit(lambda y: jnp.tanh(y))(x) * 2

    jaxpr = jaxpr_of(fun, (4,))
    tanh, times = operations(jaxpr)
    assert [tanh.name, times.name] == ["tanh", "mul"]
    assert tanh.inputs == (jaxpr.invars[0],)
    assert times.inputs[0] is tanh.outputs[0]


SHAPES = (64, 256), (256, 1024)
WEIGHTS = {(256, 1024), (1024, 256)}
HIDDEN, RESULT = 64 * 1024 * 4, 64 * 256 * 4


def test_working_bytes_are_those_of_products_that_live_together():
    def chain(x, w):
        hidden = x @ w  # 64 x 1024 float32
        return jnp.tanh(hidden) @ w.T  # the operand takes the memory of what it is made from

    assert working_bytes(jaxpr_of(chain, *SHAPES), WEIGHTS) == HIDDEN + RESULT


def test_what_a_fused_value_is_made_from_lives_as_long_as_it():
    def chain(x, w):
        hidden = x @ w
        result = jnp.tanh(hidden) @ w.T
        return jnp.sum(result) * jnp.sin(hidden)

    found = working_bytes(jaxpr_of(chain, *SHAPES), WEIGHTS)
    assert found == 2 * HIDDEN + RESULT


@pytest.mark.parametrize(
    ("shape", "bytes_"),
    [((8, 128), 4096), ((7, 100), 4096), ((3, 5, 128), 3 * 4096), ((), 4), ((1, 128), 512)],
)
def test_arrays_are_padded_to_tiles(shape, bytes_):
    assert tiled_bytes(jax.ShapeDtypeStruct(shape, F32)) == bytes_
