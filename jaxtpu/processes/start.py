"""How the processes of one run find each other, and end."""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
import traceback

import jax

from jaxtpu.errors import EXIT_CRASH, ConfigError, UserError
from jaxtpu.processes.common import HOW_TO_START, first_line, key_value_store, primary

_HEARTBEAT_SECONDS = 100  # after so many without one, the coordinator ends the run
_GRACE = 5.0  # seconds that process 0 stays for the others to end by themselves


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process this is: `--coordinator`, `--processes`, `--process_id`; None is found out."""

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None


def start(place: Place, seconds: float) -> None:
    """Joins the other processes of the run, before any device is touched.

    Without a place, those of a Cloud TPU slice, GKE, SLURM or Open MPI are found; where there is
    none of these, this process is alone.

    Raises:
      ConfigError: the place is incomplete or cannot be.
      UserError: not all joined within `seconds`.
    """
    _check(place)
    if place.coordinator is None and not _in_cluster():
        return
    done = threading.Event()
    if place.process_id == 0 and place.coordinator:
        threading.Thread(target=_say_who_waits, args=(done, place), daemon=True).start()
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _keep_native_lines_out()
    # Preemption is agreed on by `Agreement`, at steps; the service would take SIGTERM from it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process_id,
            initialization_timeout=int(seconds) or 10**6,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=60,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"not all of the {place.processes or ''} processes joined within {seconds:g} s: "
            f"{first_line(error)}\n{HOW_TO_START}"
        ) from error
    finally:
        done.set()
    store = key_value_store()
    store.key_value_set(f"jaxtpu/host/{jax.process_index()}", socket.gethostname())


@contextlib.contextmanager
def joined(place: Place, seconds: float):
    """The processes of the run together, from `start` to the end of what is done inside.

    A failure in one of several ends its process at once, rather than wait for the others, which
    wait for it.
    """
    start(place, seconds)
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            _end(error)
        raise


def _end(error: BaseException) -> None:
    code = EXIT_CRASH
    if isinstance(error, UserError):
        code = error.exit_code
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, SystemExit):
        code = error.code
    else:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if primary():  # which the others need, to end as well
        time.sleep(_GRACE)
    os._exit(code)


def _keep_native_lines_out() -> None:
    """Gloo tells of each connection on standard output, below Python."""
    with contextlib.suppress(OSError, ValueError):  # no such file: a test's, or closed
        own = os.dup(sys.stdout.fileno())
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout = os.fdopen(own, "w", 1, sys.stdout.encoding, "replace")


def _check(place: Place) -> None:
    given = dataclasses.asdict(place)
    if any(value is not None for value in given.values()):
        for name, value in given.items():
            if value is None:
                example = {"coordinator": "10.0.0.1:8476", "processes": 4, "process_id": 0}[name]
                raise ConfigError(
                    f"--{name}", "", "is missing.", f"For example: --{name}={example}"
                )
        host, _, port = place.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                "--coordinator", place.coordinator, "is not HOST:PORT.", "Use 10.0.0.1:8476."
            )
        if place.processes < 1:
            raise ConfigError("--processes", place.processes, "must be at least 1.", "Use 1.")
        if not 0 <= place.process_id < place.processes:
            raise ConfigError(
                "--process_id", place.process_id, f"is not from 0 to {place.processes - 1}.",
                "Each process has its own.",
            )  # fmt: skip


def _in_cluster() -> bool:
    """Whether the environment says that there are other processes."""
    several = {
        "SLURM_NTASKS": os.environ.get("SLURM_NTASKS", "1"),
        "OMPI_COMM_WORLD_SIZE": os.environ.get("OMPI_COMM_WORLD_SIZE", "1"),
        "JOB_COMPLETIONS": os.environ.get("JOB_COMPLETIONS", "1"),
    }
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return (
        any(value.isdigit() and int(value) > 1 for value in several.values())
        or len(hosts) > 1
        or "MEGASCALE_NUM_SLICES" in os.environ
        or "JAX_COORDINATOR_ADDRESS" in os.environ
    )


def _say_who_waits(done: threading.Event, place: Place) -> None:
    waited = 0
    while not done.wait(15):
        waited += 15
        print(
            f"waiting for {place.processes} processes at {place.coordinator} for {waited} s. {HOW_TO_START}",
            file=sys.stderr,
            flush=True,
        )
