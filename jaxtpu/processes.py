"""The processes of one run: how they find each other, agree, and name who is missing."""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import jax
from jax._src import distributed

from jaxtpu.errors import EXIT_CRASH, ConfigError, UserError

_AGREE_SECONDS = 3600  # process 0 may verify a large checkpoint meanwhile
_HEARTBEAT_SECONDS = 100  # after so many without one, the coordinator ends the run
_GRACE = 5.0  # seconds that process 0 stays for the others to end by themselves
_HOW = (
    "Every process needs the same command: on a Cloud TPU slice, gcloud compute tpus tpu-vm ssh "
    "NAME --worker=all --command='python run.py ...'; by hand, on machine i of n, python run.py ... "
    "--coordinator=HOST:PORT --processes=n --process_id=i"
)
_agreed = 0


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
            f"{_first_line(error)}\n{_HOW}"
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
            f"waiting for {place.processes} processes at {place.coordinator} for {waited} s. {_HOW}",
            file=sys.stderr,
            flush=True,
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


def agree(what: str, value: Any) -> Any:
    """The `value` of process 0, a JSON value, in all processes. All must call it in one order."""
    global _agreed
    if jax.process_count() == 1:
        return value
    _agreed += 1
    store, key = key_value_store(), f"jaxtpu/agree/{_agreed}"
    if primary():
        store.key_value_set(key, json.dumps(value))
        return value
    try:
        return json.loads(store.blocking_key_value_get(key, _AGREE_SECONDS * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"process 0 did not say within {_AGREE_SECONDS} s: {what} ({_first_line(error)})"
        ) from error


def check_same(what: dict[str, str], seconds: float) -> None:
    """Each of these words (a config's hash, versions) is the same in all processes.

    Raises:
      UserError: names the processes with another, or those that did not say within `seconds`.
    """
    count = jax.process_count()
    if count == 1:
        return
    store = key_value_store()
    store.key_value_set(f"jaxtpu/same/{jax.process_index()}", json.dumps(what))
    end, mine, absent = time.monotonic() + (seconds or _AGREE_SECONDS), what, []
    differing = []
    for process in range(count):
        try:
            left = max(1, int(1000 * (end - time.monotonic())))
            theirs = json.loads(store.blocking_key_value_get(f"jaxtpu/same/{process}", left))
        except jax.errors.JaxRuntimeError:
            absent.append(host_of(process))
            continue
        differing += [
            f"{host_of(process)} has {name} {theirs.get(name)}, here {mine[name]}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
    if absent:
        raise UserError(f"{', '.join(absent)} did not come within {seconds:g} s.\n{_HOW}")
    if differing:
        raise UserError(
            f"the processes of this run are not alike: {'; '.join(differing)}. "
            "Give all the same config, command line and versions."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


class Agreement:
    """What one process wants, done by all processes after the same step.

    Each process asks for things by name. Process 0 sees the wishes once a step and sets the step
    after which all of them do it: `lead` steps later, so that no process is past it yet.

    Args:
      lead: no process is ever so many steps ahead of another.
    """

    def __init__(self, lead: int):
        self.alone = jax.process_count() == 1
        self._store = key_value_store()
        self._lead = lead
        self._wanted: set[str] = set()
        self._read = self._written = 0
        self._pending: list[tuple[int, str]] = []

    def want(self, what: str) -> None:
        """Asks for `what`, a word; a signal handler may call it."""
        self._wanted.add(what)

    def due(self, step: int) -> frozenset[str]:
        """What all processes do after this step. Each calls it once a step, before the next."""
        if self.alone:
            wanted, self._wanted = self._wanted, set()
            return frozenset(wanted)
        while self._wanted:
            key = f"jaxtpu/want/{self._wanted.pop()}"
            self._store.key_value_set(key, "", allow_overwrite=True)
        if primary():
            self._grant(step)
        self._take_grants()
        due = frozenset(what for at, what in self._pending if at <= step)
        self._pending = [(at, what) for at, what in self._pending if at > step]
        return due

    def _grant(self, step: int) -> None:
        for key, _ in self._store.key_value_dir_get("jaxtpu/want/"):
            self._store.key_value_delete(key)
            grant = json.dumps([step + self._lead, key.rpartition("/")[2]])
            self._store.key_value_set(f"jaxtpu/grant/{self._written}", grant)
            self._written += 1

    def _take_grants(self) -> None:
        while True:
            try:
                grant = self._store.key_value_try_get(f"jaxtpu/grant/{self._read}")
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" in str(error):
                    return
                raise
            at, what = json.loads(grant)
            self._pending.append((at, what))
            self._read += 1
