"""Where attention's arrays lie on a mesh: the batch and the heads are divided, the rest is whole.

The partitioner does not look into a Pallas kernel, so kernels run on each device's own part.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtpu.sharding import Rules, active_rules, constrain


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the kernels' arrays are divided; hashable, as it is kept from a forward to its backward.

    Attributes:
      mesh: None where there is one device.
      batch, heads: the entry of a `PartitionSpec` for that dimension.
    """

    mesh: Mesh | None = None
    batch: str | tuple[str, ...] | None = None
    heads: str | tuple[str, ...] | None = None

    def spec(self, dimensions: str) -> P:
        """The spec of an array by the letters of its dimensions: B batch, H and K heads."""
        entries = {"B": self.batch, "H": self.heads, "K": self.heads}
        return P(*(entries.get(letter) for letter in dimensions))

    def on_each_device(self, function: Callable, inputs: str, outputs: str) -> Callable:
        """`function` run on each device's part of its arrays.

        Args:
          inputs, outputs: dimensions of each array, by letter: `BTHD BTKD BTKD BT`.
        """
        if self.mesh is None:
            return function
        ins, outs = (tuple(map(self.spec, names.split())) for names in (inputs, outputs))
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=ins,
            out_specs=outs if len(outs) > 1 else outs[0],
            check_vma=False,  # Pallas does not say over which axes its results vary
        )


def place(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array
) -> tuple[Placement, jax.Array, jax.Array]:
    """(placement, keys, values) by the active rules; keys and values are repeated, one for each
    query head, where their heads are not divided as those of the queries are."""
    rules = active_rules()
    if rules is None or rules.mesh.size == 1:
        return Placement(), k_BSKD, v_BSKD
    batch, _, heads, _ = rules.spec(("batch", None, "heads", None), q_BTHD.shape)
    key_heads = rules.spec(("batch", None, "kv_heads", None), k_BSKD.shape)[2]
    if heads != key_heads:
        k_BSKD, v_BSKD = _repeated(k_BSKD, v_BSKD, q_BTHD.shape[2])
    return Placement(rules.mesh, batch, heads), k_BSKD, v_BSKD


def repeat_undivided(
    k_BSKD: jax.Array, v_BSKD: jax.Array, heads: int
) -> tuple[jax.Array, jax.Array]:
    """Keys and values, repeated to `heads` where the mesh does not divide their own heads."""
    rules = active_rules()
    if rules is None or rules.divides("kv_heads", k_BSKD.shape[2]):
        return k_BSKD, v_BSKD
    return _repeated(k_BSKD, v_BSKD, heads)


def _repeated(k_BSKD: jax.Array, v_BSKD: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    # Groups would straddle devices: give each query head its own copy of its key head.
    repeats = heads // k_BSKD.shape[2]
    k_BSHD = constrain(jnp.repeat(k_BSKD, repeats, 2), "batch", None, "heads", None)
    v_BSHD = constrain(jnp.repeat(v_BSKD, repeats, 2), "batch", None, "heads", None)
    return k_BSHD, v_BSHD


def sequence_parts(rules: Rules | None) -> int:
    """Parts that the mesh divides a sequence into."""
    return math.prod(rules.mesh.shape[axis] for axis in rules.mesh_axes("sequence")) if rules else 1
