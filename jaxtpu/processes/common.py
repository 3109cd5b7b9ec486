"""What the processes of one run share, and what they are called."""

from typing import Any

import jax
from jax._src import distributed

HOW_TO_START = (
    "Every process needs the same command: on a Cloud TPU slice, gcloud compute tpus tpu-vm ssh "
    "NAME --worker=all --command='python run.py ...'; by hand, on machine i of n, python run.py ... "
    "--coordinator=HOST:PORT --processes=n --process_id=i"
)


def primary() -> bool:
    """Whether this is process 0, which alone writes metrics and tables."""
    return jax.process_index() == 0


def key_value_store() -> Any | None:
    """What the processes share, held by process 0; None where there is one process."""
    return distributed.global_state.client


def host_of(process: int) -> str:
    """`process 3 on t1v-n-3`."""
    try:
        return f"process {process} on " + key_value_store().key_value_try_get(
            f"jaxtpu/host/{process}"
        )
    except (jax.errors.JaxRuntimeError, AttributeError):
        return f"process {process}"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
