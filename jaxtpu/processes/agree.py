"""How the processes of one run agree: on a value, on a step, and on being alike."""

import json
import time
from typing import Any

import jax

from jaxtpu.errors import UserError
from jaxtpu.processes.common import HOW_TO_START, first_line, host_of, key_value_store, primary

_AGREE_SECONDS = 3600  # process 0 may verify a large checkpoint meanwhile
_agreed = 0


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
            f"process 0 did not say within {_AGREE_SECONDS} s: {what} ({first_line(error)})"
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
        raise UserError(f"{', '.join(absent)} did not come within {seconds:g} s.\n{HOW_TO_START}")
    if differing:
        raise UserError(
            f"the processes of this run are not alike: {'; '.join(differing)}. "
            "Give all the same config, command line and versions."
        )


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
