"""What is asked of the TPU compiler, what it answered, and those answers kept on disk.

An answer is kept under two keys: of the request with this package's sources, found without
importing JAX; and of the lowered program, which finds it again after a change of the sources that
changed nothing in the program. As in JAX's own cache, the second leaves out where in the source an
operation comes from, so the source lines in a text found through it may be those of before.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import uuid
from typing import Any

from jaxtpu.environment import has_libtpu
from jaxtpu.errors import ConfigError, UserError, nearest
from jaxtpu.hardware import parse_slice

DIRECTORY = "~/.cache/jaxtpu/plans"
PROGRAMS = ("init", "train", "evaluate")

_PACKAGE = pathlib.Path(__file__).parents[1]
_LOWERED_BY = ("flax", "optax")  # besides JAX; their versions change programs
_NOT_IN_PROGRAMS = ("name", "workdir", "compile_cache", "plan")
_NOT_JAX_SETTINGS = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")


class CompilerMissingError(UserError):
    """libtpu is not installed; callers may fall back to estimates, labelled so."""

    def __init__(self):
        super().__init__(
            "the TPU compiler (libtpu) is not installed; it is available on Linux x86-64."
        )


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """One program of one configuration on one slice.

    Attributes:
      config: `Config.to_dict()`; it is finalized for the slice where it is compiled.
      slice: name, as `hardware.parse_slice` reads it.
      hbm_gib: budget of a device, GiB, in whole MiB. The compiler's own limit holds all the same:
        a budget above it is as good as that limit.
      vocab_size: ids of the tokenizer.
      program: one of `PROGRAMS`.
      examples: sequences in the training data; None where that is not known.
      compiler_options: more options of the compiler, by name; an empty value leaves an option of
        the generation (`Generation.compiler_options`) as the compiler has it.

    Raises:
      ConfigError: there is no such slice or program, or the budget is below 1 MiB.
    """

    config: dict[str, Any]
    slice: str
    hbm_gib: float
    vocab_size: int
    program: str = "train"
    examples: int | None = None
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        parse_slice(self.slice)
        if self.program not in PROGRAMS:
            raise ConfigError(
                "program", self.program, "is not a program.", nearest(self.program, PROGRAMS)
            )
        if self.hbm_gib * 1024 < 1:  # the compiler takes 0 for no limit
            raise ConfigError("hbm_gib", self.hbm_gib, "is below 1 MiB.", "Use 8, for example.")

    @property
    def options(self) -> dict[str, Any]:
        """Every option that the compiler is given."""
        budget = {"xla_tpu_max_hbm_size_mib": str(int(self.hbm_gib * 1024))}
        usual = dict(parse_slice(self.slice).generation.compiler_options)
        options = budget | usual | self.compiler_options
        return {name: value for name, value in options.items() if value != ""}


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """What the compiler said. Bytes are of one device.

    Attributes:
      fits: whether it compiled within the budget.
      hbm_bytes: HBM of the compiled program, by the compiler's own account: arguments, results and
        temporaries at their peak. The code (`code_bytes`) comes on top, so a budget within that of
        this figure is too small. None where it did not compile.
      needed_bytes: where the budget is too small, how much the compiler would need. It prints three
        digits or so, and where far too much is needed, it counts without workspace and code: at
        least this much. None where it fits, or the text has no figure.
      peak_bytes: of `hbm_bytes`, what is live at the peak; the rest are holes between buffers. More
        budget, more holes: a program may fit in a budget that is as small as this.
      argument_bytes, output_bytes, alias_bytes, temp_bytes, code_bytes: as the compiler reports
        them: in HBM; they do not add up to `hbm_bytes`, for temporaries share memory.
      host_bytes: host memory (`pinned_host`) of arguments, results and temporaries.
      hlo_path: file of the scheduled program as gzipped text; empty where it did not compile.
      seconds: what lowering and compiling took when it was done.
      versions: of jax, jaxlib and libtpu.
      error: why it did not compile, in a line, if for another reason than memory; else empty.
      field: dotted name of the configuration's field that is at fault; else empty.
      message: all that the compiler wrote about the failure.
    """

    fits: bool = False
    hbm_bytes: int | None = None
    needed_bytes: int | None = None
    peak_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    host_bytes: int = 0
    hlo_path: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""
    field: str = ""
    message: str = ""


def has_compiler() -> bool:
    """Whether the TPU compiler is installed."""
    return has_libtpu()


@functools.cache
def _versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def libtpu_versions() -> dict[str, str]:
    """Versions of jax, jaxlib and libtpu, without importing them.

    Raises:
      CompilerMissingError: libtpu is not installed.
    """
    if not has_compiler():
        raise CompilerMissingError
    return _versions("jax", "jaxlib", "libtpu")


@functools.cache
def _sources() -> str:
    """Hash of this package's source files."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _hash(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def program_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration (`Config.to_dict()`) without what no program depends on."""
    return {name: value for name, value in config.items() if name not in _NOT_IN_PROGRAMS}


def request_key(request: CompileRequest) -> str:
    """Key of everything that decides the answer to `request`, without lowering it."""
    asked = dataclasses.asdict(request)
    asked["config"] = program_fields(request.config)
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("JAX_") and name not in _NOT_JAX_SETTINGS
    }
    return sources_key(asked, libtpu_versions(), settings, _libtpu_flags())


def sources_key(*facts: Any) -> str:
    """Key of what this package, its Python and its libraries make of `facts` (JSON values)."""
    return _hash(facts, sys.version_info[:3], _versions("jax", *_LOWERED_BY), _sources())


def program_key(request: CompileRequest, stablehlo: str, device_ids: list[int]) -> str:
    """Key of a lowered program on devices in this order, and of what it is compiled with."""
    slice_ = parse_slice(request.slice)
    topology = [slice_.topology_name, slice_.topology_kwargs, device_ids]
    told = [field.name for field in dataclasses.fields(CompileResult)]  # older answers lack some
    return _hash(stablehlo, request.options, topology, libtpu_versions(), _libtpu_flags(), told)


def _libtpu_flags() -> str:
    return os.environ.get("LIBTPU_INIT_ARGS", "")


def load(folder: pathlib.Path, key: str) -> CompileResult | None:
    """The answer kept under `key`; None where there is none, or its files are damaged."""
    try:
        entry = json.loads((folder / f"{key}.json").read_text())
        result = CompileResult(**entry["result"])
        if result.hlo_path:
            path = folder / result.hlo_path
            if hashlib.sha256(path.read_bytes()).hexdigest() != entry["hlo_sha256"]:
                return None
            result = dataclasses.replace(result, hlo_path=str(path))
        return result
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(folder: pathlib.Path, key: str, result: CompileResult) -> None:
    """Keeps an answer under `key`; its `hlo_path` is in `folder` already.

    Raises:
      OSError: the disk is full, or `folder` cannot be written.
    """
    path = pathlib.Path(result.hlo_path)
    values = {**dataclasses.asdict(result), "hlo_path": path.name if result.hlo_path else ""}
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if result.hlo_path else ""
    entry = {"result": values, "hlo_sha256": digest}
    write_whole(folder / f"{key}.json", json.dumps(entry, indent=1).encode())


def store_hlo(folder: pathlib.Path, key: str, text: str) -> str:
    """Writes a program's text; returns the path for `CompileResult.hlo_path`."""
    path = folder / f"{key}.hlo.gz"
    write_whole(path, gzip.compress(text.encode(), compresslevel=6, mtime=0))
    return str(path)


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """All of it or nothing, whoever else writes the same file."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_hlo(result: CompileResult) -> str:
    """The scheduled program of a result that fits, as `compiled.as_text()` had it.

    Raises:
      OSError: its file is gone.
    """
    return gzip.decompress(pathlib.Path(result.hlo_path).read_bytes()).decode()
