"""Emulated devices: many steps in a row finish, on a machine of few cores too."""

import os
import subprocess
import sys

import pytest

# Eight 256 x 1024 layers on 2 x 2 x 2 devices, 100 steps dispatched at once. With XLA's own pool
# of threads (as many as there are cores) jax 0.10.2 on two cores kills this process after 40 s.
_PROGRAM = """
from jaxtpu import environment
environment.prepare(8)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))

@jax.jit
def step(layers, x):
    def loss(layers):
        h = x
        for up, down in layers:
            h = h + jnp.tanh(h @ up) @ down
        return (h**2).mean()
    return jax.tree.map(lambda p, g: p - 1e-3 * g, layers, jax.grad(loss)(layers))

def ones(shape, *spec):
    return jax.device_put(jnp.ones(shape) * 0.01, NamedSharding(mesh, P(*spec)))

layers = [(ones((256, 1024), "fsdp", "tensor"), ones((1024, 256), "tensor", "fsdp"))
          for _ in range(8)]
x = ones((64, 256), ("data", "fsdp"))
for _ in range(100):
    layers = step(layers, x)
jax.block_until_ready(layers)
print("finished")
"""


def _run(program: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_a_hundred_steps_in_flight_do_not_deadlock():
    result = _run(_PROGRAM)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == "finished\n"
    assert result.stderr == ""


def test_settings_of_the_user_stay():
    program = "from jaxtpu import environment; environment.prepare(4); import os;"
    program += "print(os.environ['NPROC'], os.environ['JAX_PLATFORMS'], os.environ['XLA_FLAGS'])"
    flags = "--xla_force_host_platform_device_count=2"
    result = _run(program, NPROC="7", JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    words = result.stdout.split()
    assert words[:3] == ["7", "cpu", flags]
    assert not any("device_count=4" in word for word in words)
