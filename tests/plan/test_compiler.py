import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import jax
import pytest

from jaxtpu.errors import ConfigError, UserError
from jaxtpu.hardware import parse_slice
from jaxtpu.plan import compile_cache, compiler, refusal
from jaxtpu.plan.compiler import CompileRequest, CompileResult, compile_all, read_hlo
from tests.tiny import VOCABULARY, tiny_config

ROOT = pathlib.Path(__file__).parents[2]
MIB = 2**20


def request(program="train", budget_mib=8192, config=None, **changes) -> CompileRequest:
    config = config or tiny_config().to_dict()
    return CompileRequest(config, "v3-8", budget_mib / 1024, VOCABULARY, program, 1000, **changes)


def wide_config(batch_size=64) -> dict:
    """A config whose evaluation holds much more memory than code."""
    return tiny_config(data={"batch_size": batch_size, "sequence_length": 512}).to_dict()


# What the compiler says, as libtpu 0.0.42.1 (jax 0.10.2) and 0.0.50.1 (jax 0.12.0.1) said it.


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (3.15M) exceeds available HBM (1.00M).",
            3.15 * MIB,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (3.04G) exceeds available HBM (2.00G). HLO "
            "module: jit_train_step.\nSee https://openxla.org/xla/errors/error_1000 for more "
            "details.",
            3.04 * 2**30,
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran "
            "out of memory in memory space hbm. Used 4.98M of 4.00M hbm. Exceeded hbm capacity by "
            "999.0K.\n\nTotal hbm usage >= 534.98M:\n    reserved        530.01M",
            4.98 * MIB,
        ),
    ],
)
def test_too_little_memory_says_how_much_is_needed(text, needed):
    result = refusal.explain(RuntimeError(text))
    assert not result.fits and not result.error and result.message == text
    assert result.needed_bytes == round(needed)
    assert refusal.is_lasting(RuntimeError(text))


def test_other_failures_are_one_line():
    vmem = "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=16777216)"
    mosaic = "INTERNAL: Mosaic failed to compile TPU kernel: Unsupported matmul RHS type on target"
    for text in (vmem, mosaic):
        error = RuntimeError(text + "\nSee https://openxla.org/xla/errors/error_2001\n\nand more")
        result = refusal.explain(error)
        assert result.error == text and result.needed_bytes is None and "and more" in result.message
        assert refusal.is_lasting(error)
    bug = KeyError("axis")
    assert refusal.explain(bug).error == "KeyError: 'axis'" and not refusal.is_lasting(bug)
    wrong = ConfigError("data.batch_size", 17, "is odd.")
    assert refusal.explain(wrong).field == "data.batch_size"


@pytest.mark.parametrize("total", [0, 128 * MIB])
def test_host_memory_is_not_hbm(total):
    # What both compilers reported of a program with a donated argument in pinned_host.
    names = ("argument", "output", "alias", "host_argument", "host_output", "host_alias")
    figures = {f"{name}_size_in_bytes": 32 * MIB for name in names}
    figures |= {"temp_size_in_bytes": 96 * MIB, "peak_memory_in_bytes": 160 * MIB}
    figures |= {"host_temp_size_in_bytes": 0, "generated_code_size_in_bytes": 0}
    result = compiler._fits(types.SimpleNamespace(total_allocation_bytes=total, **figures), "")
    assert result.hbm_bytes == 128 * MIB and result.host_bytes == 32 * MIB


@pytest.mark.parametrize(("total", "hbm"), [(0, 2184), (2079, 2079)])
def test_temporaries_on_the_host_are_not_in_the_peak(total, hbm):
    # What both compilers reported of a step with offloaded activations, in MiB; 2068 were needed.
    figures = {"argument": 776, "output": 776, "alias": 776, "temp": 1865, "generated_code": 39}
    figures |= {"host_argument": 0, "host_output": 0, "host_alias": 0, "host_temp": 1408}
    figures = {f"{name}_size_in_bytes": size * MIB for name, size in figures.items()}
    figures |= {"peak_memory_in_bytes": 2184 * MIB, "total_allocation_bytes": total * MIB}
    result = compiler._fits(types.SimpleNamespace(**figures), "")
    assert result.hbm_bytes == result.peak_bytes == hbm * MIB
    assert result.host_bytes == 1408 * MIB


def test_without_the_compiler_everything_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_cache, "has_libtpu", lambda: False)
    assert not compiler.has_compiler()
    for call in (
        lambda: compile_all([request()], directory=str(tmp_path)),
        lambda: compiler.slice_devices(parse_slice("v3-8")),
        compiler.libtpu_versions,
    ):
        with pytest.raises(compiler.CompilerMissingError, match="available on Linux x86-64"):
            call()


def test_a_full_disk_ends_all_compiling(tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "plans/x")

    monkeypatch.setattr(compiler, "_compile", no_space)
    task = {"folder": str(tmp_path), "key": "x", "request": dataclasses.asdict(request("train"))}
    with pytest.raises(UserError, match="compiling has stopped: .*No space left on device"):
        compiler._result(compiler._answer(task))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", compiler.PROGRAMS)
def test_each_program_is_lowered(program, monkeypatch):
    monkeypatch.setattr(compiler, "_devices", lambda slice_: jax.devices()[: slice_.devices])
    lowered, ids = compiler._lower(request(program))
    name = {"init": "init", "train": "train_step", "evaluate": "batch_sums"}[program]
    assert f"@jit_{name}" in lowered.as_text() and sorted(ids) == list(range(8))


# The compiler itself.

_COMPILE = """
import dataclasses, json, sys
from jaxtpu.plan.compiler import CompileRequest, compile_all
requests = [CompileRequest(**values) for values in json.loads(sys.argv[1])]
results = compile_all(requests, directory=sys.argv[2])
assert "jax" not in sys.modules
print(json.dumps([dataclasses.asdict(result) for result in results]))
"""
_DIRECT = """
import json, os, sys
os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")
from jax.experimental import topologies
from jaxtpu.config import Config, finalize, run_units
from jaxtpu.mesh import make_mesh
from jaxtpu.train.programs import build_programs
devices = topologies.get_topology_desc("v3:2x2", platform="tpu").devices
config = Config()
config.update(json.loads(sys.argv[1]))
mesh = make_mesh(finalize(config, 8, 257), devices)
programs = build_programs(config, mesh, run_units(config, 1000))
lowered = programs.train_step.lower(programs.abstract_state, programs.abstract_batch)
options = {"xla_tpu_max_hbm_size_mib": "8192"}
m = lowered.compile(compiler_options=options).memory_analysis()
total = getattr(m, "total_allocation_bytes", 0) or m.peak_memory_in_bytes
print(json.dumps([total, m.argument_size_in_bytes, m.temp_size_in_bytes]))
"""
_SLOW = """
import json, sys
from jaxtpu.plan import compiler, workers
start = workers.start_worker
def start_and_tell(*arguments):
    worker = start(*arguments)
    print(worker.process.pid, flush=True)
    return worker
workers.start_worker = start_and_tell
requests = [compiler.CompileRequest(**values) for values in json.loads(sys.argv[1])]
compiler.compile_all(requests, directory=sys.argv[2], workers=2)
"""


def python(script: str, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def as_json(requests: list[CompileRequest]) -> str:
    return json.dumps([dataclasses.asdict(r) for r in requests])


@dataclasses.dataclass
class Compiled:
    folder: str
    requests: list[CompileRequest]
    results: list[CompileResult]
    stderr: str


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Compiled:
    """A train step, an evaluation and a wrong config, compiled by a process of their own."""
    folder = str(tmp_path_factory.mktemp("plans"))
    wide, wrong = wide_config(), wide_config(batch_size=17)
    requests = [request(), request("evaluate", config=wide), request(config=wrong)]
    child = python(_COMPILE, as_json(requests), folder, cwd=folder)
    stdout, stderr = child.communicate()
    assert child.returncode == 0, stderr
    results = [CompileResult(**values) for values in json.loads(stdout)]
    return Compiled(folder, requests, results, stderr)


class TestCompiler:
    pytestmark = pytest.mark.tpu_compile

    def test_figures_are_those_of_a_direct_compile(self, compiled):
        train, evaluate, _ = compiled.results
        direct, _ = python(_DIRECT, json.dumps(compiled.requests[0].config)).communicate()
        assert json.loads(direct) == [train.hbm_bytes, train.argument_bytes, train.temp_bytes]
        for result in (train, evaluate):
            assert result.fits and not result.error and result.host_bytes == 0
            assert result.versions == compiler.libtpu_versions() and result.seconds > 0
            assert "is_scheduled=true" in read_hlo(result).partition("\n")[0]

    def test_nothing_is_said(self, compiled):
        assert compiled.stderr == ""

    def test_a_wrong_config_is_a_result(self, compiled):
        wrong = compiled.results[2]
        assert not wrong.fits and wrong.field == "data.batch_size" and "Use 16" in wrong.error

    def test_the_cache_answers_without_a_worker(self, compiled, started):
        told = []
        begin = time.monotonic()
        results = compile_all(
            compiled.requests * 4,
            on_done=lambda *pair: told.append(pair),
            directory=compiled.folder,
        )
        assert time.monotonic() - begin < 1
        assert results == compiled.results * 4 and not started
        assert len(told) == 12 and told[0] == (compiled.requests[0], compiled.results[0])

    def test_the_budget_is_enforced(self, compiled):
        hbm, peak = compiled.results[1].hbm_bytes, compiled.results[1].peak_bytes
        budgets = (hbm // MIB + 8, peak // MIB - 8)  # between them, holes are what it saves
        asked = [request("evaluate", budget, wide_config()) for budget in budgets]
        above, below = compile_all(asked, workers=1, directory=compiled.folder)
        assert above.fits and above.hbm_bytes <= budgets[0] * MIB
        assert not below.fits and not below.error and "exceeds available HBM" in below.message
        assert peak <= hbm and abs(below.needed_bytes - peak) < 4 * MIB

    def test_a_damaged_entry_is_compiled_again(self, compiled, started):
        key = compile_cache.request_key(compiled.requests[1])
        path = pathlib.Path(compiled.folder, f"{key}.json")
        whole = path.read_text()
        path.write_text(whole[: len(whole) // 2])
        again = compile_all([compiled.requests[1]], directory=compiled.folder)
        # Its program is still there under its own key, so even the seconds are the same.
        assert again == compiled.results[1:2] and path.read_text() == whole and len(started) == 1

    def test_a_crash_of_the_compiler_is_a_result(self, compiled, monkeypatch, capfd):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag=1")
        (result,) = compile_all(compiled.requests[:1], directory=compiled.folder)
        assert not result.fits and result.error.startswith("the process ended with exit code 1")
        assert "no_such_flag" in result.error and "no_such_flag" in result.message
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_no_worker_outlives_its_parent(self, number, tmp_path):
        requests = [request(config=tiny_config(seed=seed).to_dict()) for seed in (1, 2)]
        parent = python(_SLOW, as_json(requests), str(tmp_path))
        pids = [int(parent.stdout.readline()) for _ in requests]
        time.sleep(2)
        assert all(is_running(pid) for pid in pids)
        parent.send_signal(number)
        _, stderr = parent.communicate()
        deadline = time.monotonic() + (0 if number == signal.SIGINT else 10)
        while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(is_running(pid) for pid in pids)
        if number == signal.SIGINT:
            assert stderr.strip().endswith("KeyboardInterrupt") and "E0000" not in stderr


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that is dead and not yet waited for."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
