"""Trains large models in JAX and Flax on TPU slices with little memory per core.

For a script of one's own: `Trainer`, `emulate`. They are imported when they are first used.
"""

_WHERE = {"Trainer": "jaxtpu.interface.trainer", "emulate": "jaxtpu.environment"}

__all__ = ["Trainer", "emulate"]  # noqa: F822 (see `__getattr__`)


def __getattr__(name: str):
    import importlib

    if name not in _WHERE:
        raise AttributeError(f"module 'jaxtpu' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
