import dataclasses
import pathlib

import pytest

from jaxtpu.config import Config
from jaxtpu.errors import ConfigError
from jaxtpu.hardware import parse_slice
from jaxtpu.plan import compile_cache
from jaxtpu.plan.compile_cache import CompileRequest, CompileResult, read_hlo
from tests.tiny import VOCABULARY, tiny_config


def request(program="train", budget_mib=8192, config=None, **changes) -> CompileRequest:
    config = config or tiny_config().to_dict()
    return CompileRequest(config, "v3-8", budget_mib / 1024, VOCABULARY, program, 1000, **changes)


def test_a_request_that_cannot_be():
    config = Config().to_dict()
    with pytest.raises(ConfigError, match="Did you mean 'train'"):
        CompileRequest(config, "v3-8", 8, VOCABULARY, "trian")
    with pytest.raises(ConfigError, match="below 1 MiB"):
        CompileRequest(config, "v3-8", 0.0005, VOCABULARY)
    with pytest.raises(ConfigError, match="Use v3-8"):
        CompileRequest(config, "v3-9", 8, VOCABULARY)


@pytest.mark.tpu_compile
def test_the_key_has_what_matters(monkeypatch):
    first = request()
    key = compile_cache.request_key(first)
    elsewhere = dataclasses.replace(first, config=first.config | {"workdir": "/tmp/x", "name": "x"})
    assert compile_cache.request_key(elsewhere) == key
    others = [
        request("evaluate"),
        request(budget_mib=8191),
        request(compiler_options={"xla_tpu_x": "1"}),
        request(config=tiny_config(seed=1).to_dict()),
        dataclasses.replace(first, slice="v2-8"),
    ]
    assert len({key, *map(compile_cache.request_key, others)}) == 1 + len(others)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_y=1")
    assert compile_cache.request_key(first) != key
    assert compile_cache.program_key(first, "a", [0, 1]) != compile_cache.program_key(
        first, "a", [1, 0]
    )


def test_damaged_entries_are_not_read(tmp_path):
    hlo = compile_cache.store_hlo(tmp_path, "k", "HloModule jit_f")
    kept = CompileResult(fits=True, hbm_bytes=3, hlo_path=hlo, versions={"jax": "1"})
    compile_cache.store(tmp_path, "k", kept)
    assert compile_cache.load(tmp_path, "k") == kept
    assert read_hlo(kept) == "HloModule jit_f"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.hlo.gz", "k.json"]
    assert compile_cache.load(tmp_path, "other") is None

    entry = (tmp_path / "k.json").read_text()
    for damaged in (entry[:100], "[]", "{}", '{"result": {"fit": 1}}'):
        (tmp_path / "k.json").write_text(damaged)
        assert compile_cache.load(tmp_path, "k") is None
    (tmp_path / "k.json").write_text(entry)
    pathlib.Path(hlo).write_bytes(pathlib.Path(hlo).read_bytes()[:-1])
    assert compile_cache.load(tmp_path, "k") is None


def test_options_are_those_of_the_generation_unless_the_request_says_otherwise():
    (name, usual), *_ = parse_slice("v5e-8").generation.compiler_options
    config = tiny_config().to_dict()

    def options(**chosen):
        return CompileRequest(config, "v5e-8", 8, VOCABULARY, compiler_options=chosen).options

    assert options()[name] == usual
    assert options(**{name: "7"})[name] == "7"
    assert name not in options(**{name: ""})
    assert options(other="1") == options() | {"other": "1"}
