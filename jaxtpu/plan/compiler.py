"""Compiles the programs of a configuration for a slice that is not there, under an HBM budget.

The compiler is the one that TPUs run with (libtpu). It runs in other processes: it is loud, it
takes cores and memory, it may crash, and this process may hold real devices. Nothing here imports
JAX but what those processes run.
"""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxtpu.config import Config, finalize, run_units
from jaxtpu.errors import UserError
from jaxtpu.hardware import Slice, parse_slice
from jaxtpu.plan.compile_cache import (
    DIRECTORY,
    PROGRAMS,
    CompileRequest,
    CompileResult,
    CompilerMissingError,
    has_compiler,
    libtpu_versions,
    load,
    program_key,
    read_hlo,
    request_key,
    store,
    store_hlo,
)
from jaxtpu.plan.refusal import explain, failure, is_lasting
from jaxtpu.plan.workers import Died, Pool, serve

__all__ = [
    "PROGRAMS", "CompileRequest", "CompileResult", "CompilerMissingError", "compile_all",
    "has_compiler", "libtpu_versions", "read_hlo", "slice_devices",
]  # fmt: skip

# libtpu waits for a metadata server without the first; without the second, one process at a time.
_LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# The first two emulate CPU devices; the cache is for programs that train.
_NOT_FOR_WORKERS = ("XLA_FLAGS", "NPROC", "JAX_COMPILATION_CACHE_DIR")
_WORKER_BYTES = 3 * 2**30  # host memory: 1.6 to 2.3 GiB were seen for Llama-2-7B on v3-32
_MACHINE_FAULT = "machine_fault"  # key of a worker's answer that is no result


def compile_all(
    requests: Sequence[CompileRequest],
    *,
    workers: int | None = None,
    on_done: Callable[[CompileRequest, CompileResult], None] | None = None,
    budget_s: float | None = None,
    directory: str = DIRECTORY,
) -> list[CompileResult]:
    """The compiler's answer to each request, from the cache or from worker processes.

    A worker that dies, or a program that the compiler refuses, is a result with `error`; the other
    requests go on. No process is left behind, however this ends.

    Args:
      workers: processes at a time; None takes as many as there are cores and memory for.
      on_done: told of each result as it comes; those of the cache come first.
      budget_s: seconds after which what is not compiled is given up.
      directory: of the cache.

    Raises:
      CompilerMissingError: libtpu is not installed.
      UserError: the cache's folder cannot be made, or not written.
    """
    if not has_compiler():
        raise CompilerMissingError
    folder = _folder(directory)
    keys = [request_key(request) for request in requests]
    asked: dict[str, list[CompileRequest]] = {}
    for key, request in zip(keys, requests, strict=True):
        asked.setdefault(key, []).append(request)
    results: dict[str, CompileResult] = {}
    # Closed even if `on_done` raises: that is what stops the workers.
    with contextlib.closing(_answers(folder, asked, workers, budget_s)) as answers:
        for key, result in answers:
            results[key] = result
            for request in asked[key] if on_done else []:
                on_done(request, result)
    return [results[key] for key in keys]


def _answers(
    folder: pathlib.Path,
    asked: dict[str, list[CompileRequest]],
    workers: int | None,
    budget_s: float | None,
) -> Iterator[tuple[str, CompileResult]]:
    """(key, result) as they come, one for each key, under which requests are equal."""
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    missing: dict[str, dict[str, Any]] = {}
    for key, requests in asked.items():
        known = load(folder, key)
        if known:
            yield key, known
        else:
            values = dataclasses.asdict(requests[0])
            missing[key] = {"key": key, "folder": str(folder), "request": values}
    if not missing:
        return
    late = dict.fromkeys(missing)
    size = min(len(missing), workers or _affordable_workers())
    with Pool("jaxtpu.plan.compiler:serve_compiles", _worker_environment(), size) as pool:
        for key, answer in pool.run(missing, deadline):
            del late[key]
            yield key, _result(answer)
    for key in late:
        yield key, failure(f"not compiled: the {budget_s:g} s for all of it are over")


def _folder(directory: str) -> pathlib.Path:
    folder = pathlib.Path(directory).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder of compiled plans cannot be made: {error}.") from None
    return folder


def _worker_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in _NOT_FOR_WORKERS}
    return {**kept, **_LIBTPU, "JAX_PLATFORMS": "cpu"}


def _affordable_workers() -> int:
    """One a core, and no more than the free memory holds, where the system tells."""
    cores = len(os.sched_getaffinity(0))
    try:
        words = pathlib.Path("/proc/meminfo").read_text().split()
        available = int(words[words.index("MemAvailable:") + 1]) * 1024
    except (OSError, ValueError):
        return cores
    return max(1, min(cores, available // _WORKER_BYTES))


def _result(answer: dict[str, Any] | Died) -> CompileResult:
    if isinstance(answer, Died):
        return failure(answer.reason, answer.output)
    if _MACHINE_FAULT in answer:
        raise UserError(f"compiling has stopped: {answer[_MACHINE_FAULT]}.")
    return CompileResult(**answer)


# What follows runs in the workers.


def slice_devices(slice_: Slice) -> list[Any]:
    """Compile-only `jax.Device`s of a slice.

    This loads libtpu, which writes to standard error: it is for processes whose standard error no
    user sees.

    Raises:
      CompilerMissingError: libtpu is not installed.
    """
    if not has_compiler():
        raise CompilerMissingError
    os.environ.update(_LIBTPU)
    from jax.experimental import topologies

    name, arguments = slice_.topology_name, slice_.topology_kwargs
    return list(topologies.get_topology_desc(name, platform="tpu", **arguments).devices)


_devices = functools.cache(slice_devices)


def serve_compiles() -> None:
    """What a worker process runs."""
    serve(_answer)


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    import jax

    folder, request = pathlib.Path(task["folder"]), CompileRequest(**task["request"])
    try:
        try:
            result, lasting = _compile(request, folder), True
        except OSError:
            raise
        except Exception as error:  # whatever it is, it is this request's alone
            result, lasting = explain(error), is_lasting(error)
        if lasting:
            store(folder, task["key"], result)
    except OSError as error:  # a full disk: of the machine, hence of every request
        return {_MACHINE_FAULT: str(error)}
    jax.clear_caches()
    return dataclasses.asdict(result)


def _compile(request: CompileRequest, folder: pathlib.Path) -> CompileResult:
    started = time.monotonic()
    lowered, device_ids = _lower(request)
    key = program_key(request, lowered.as_text(), device_ids)
    known = load(folder, key)
    if known:
        return known
    try:
        compiled = lowered.compile(compiler_options=request.options)
    except Exception as error:
        if not is_lasting(error):
            raise
        result = explain(error)
    else:
        path = store_hlo(folder, key, compiled.as_text())
        result = _fits(compiled.memory_analysis(), path)
    result = dataclasses.replace(result, seconds=time.monotonic() - started)
    store(folder, key, result)
    return result


def _lower(request: CompileRequest) -> tuple[Any, list[int]]:
    """The lowered program, and the ids of the devices in the order of the mesh."""
    from jaxtpu.mesh import make_mesh
    from jaxtpu.train.programs import build_programs

    config, slice_ = Config(), parse_slice(request.slice)
    config.update(request.config)
    sizes = finalize(config, slice_.devices, request.vocab_size)
    mesh = make_mesh(sizes, _devices(slice_))
    programs = build_programs(config, mesh, run_units(config, request.examples))
    state, batch = programs.abstract_state, programs.abstract_batch
    lowered = {
        "init": lambda: programs.init.lower(),
        "train": lambda: programs.train_step.lower(state, batch),
        "evaluate": lambda: programs.eval_step.lower(state.evaluated(), batch),
    }[request.program]()
    return lowered, [device.id for device in mesh.devices.flat]


def _fits(analysis: Any, hlo_path: str) -> CompileResult:
    """The result of a program that compiled.

    `peak_memory_in_bytes` counts arguments and results in host memory too. Where temporaries are
    there, it is not exact: 5% above what the compiler's refusal said that a step needs.
    """
    host = (
        analysis.host_argument_size_in_bytes
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
    )
    peak = analysis.peak_memory_in_bytes - host
    total = getattr(analysis, "total_allocation_bytes", 0)  # jax 0.12; 0.10 has the peak only
    peak = min(peak, total or peak)
    return CompileResult(
        fits=True,
        hbm_bytes=total or peak,
        peak_bytes=peak,
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        code_bytes=analysis.generated_code_size_in_bytes,
        host_bytes=host + analysis.host_temp_size_in_bytes,
        hlo_path=hlo_path,
        versions=libtpu_versions(),
    )
