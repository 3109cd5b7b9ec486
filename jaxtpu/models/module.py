"""The base of our modules: operations carry the path of the module that made them."""

import functools

import jax
from flax import nnx


class Module(nnx.Module):
    """An NNX module whose `__call__` runs in a `jax.named_scope` of the attribute that holds it.

    So profiles, compiler dumps and memory reports name `decoder/layers/mlp/gate`, the path that
    the parameters have too.
    """

    scope: str = ""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__:
            cls.__call__ = scoped(cls.__call__)

    def __setattr__(self, name: str, value) -> None:
        if isinstance(value, Module):
            value.scope = name
        super().__setattr__(name, value)


def scoped(call):
    """A method of a `Module` that runs in its scope, as `__call__` does."""

    @functools.wraps(call)
    def scoped_call(self, *args, **kwargs):
        with jax.named_scope(self.scope or type(self).__name__.lower()):
            return call(self, *args, **kwargs)

    return scoped_call
