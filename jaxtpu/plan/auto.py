"""`mesh=auto`: a run takes the plan for the devices that it finds."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Sequence, Set

import jax
from rich.console import Console

from jaxtpu.config import Config
from jaxtpu.config.validate import MESH_AXES
from jaxtpu.errors import ConfigError, UserError
from jaxtpu.hardware import Slice, generation_of, parse_slice
from jaxtpu.plan.candidates import KNOBS, Candidate, fixed_fields
from jaxtpu.plan.command import budget, without_mesh
from jaxtpu.plan.compile_cache import (
    DIRECTORY,
    has_compiler,
    libtpu_versions,
    program_fields,
    sources_key,
    write_whole,
)
from jaxtpu.plan.programs import whole_runs
from jaxtpu.plan.progress import progress
from jaxtpu.plan.search import plan_slice

_REHEARSED = "v3"  # the slices that emulated devices stand for


def take_plan(
    config: Config,
    given: Set[str],
    devices: Sequence[jax.Device],
    vocab_size: int,
    out: Console,
) -> Config:
    """`config` with mesh, remat, attention and microbatches from the plan for `devices`.

    The plan is kept, so the next start takes it at once. Emulated devices rehearse a v3 slice of
    their number.

    Args:
      config: as loaded, with `mesh.auto`.
      given: dotted names that the command line sets: these stay, whatever their value.

    Raises:
      ConfigError: the devices are no slice, or nothing fits together.
      UserError: nothing fits into the budget.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "mesh", "auto", "each process would plan for itself.",
            "Paste the line that `run.py plan` ends with.",
        )  # fmt: skip
    slice_ = slice_of(devices)
    fixed, gib = fixed_fields(config, set(given), set()), budget(slice_)
    versions = libtpu_versions() if has_compiler() else {}
    key = sources_key(program_fields(config.to_dict()), slice_.name, versions, gib, sorted(fixed))
    path = pathlib.Path(DIRECTORY).expanduser() / f"auto-{key}.json"
    candidate = _read(path)
    if candidate is None:
        ready, units = without_mesh(config, slice_, vocab_size)
        known = {"hbm_gib": gib, "vocab_size": vocab_size}
        with progress(out, f"mesh=auto for {slice_.name}") as known["on_progress"]:
            plan = plan_slice(ready, slice_, units, fixed=fixed, **known)
            plan, _ = whole_runs(plan, ready, units, **known)
        if plan.best is None:
            raise UserError(
                f"mesh=auto: nothing fits into {gib:g} GiB of a {slice_.name} device. `run.py plan` "
                f"with this --config and --slice={slice_.name} says why, and what would fit."
            )
        candidate = plan.best.candidate
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(dataclasses.asdict(candidate)).encode())
    if generation_of(devices[0].device_kind) is None:  # a TPU's kernel would be interpreted here
        knobs = dict(candidate.knobs) | {"model.attention": config.model.attention}
        candidate = dataclasses.replace(candidate, knobs=tuple(knobs.items()))
    out.print(f"mesh=auto took, for {slice_.name}: {candidate.flags()}", markup=False)
    return candidate.apply(config)


def _read(path: pathlib.Path) -> Candidate | None:
    """The plan kept at `path`; None where there is none, or the file is damaged."""
    try:
        values = json.loads(path.read_text())
        kept = Candidate(tuple(values["mesh"]), tuple(map(tuple, values["knobs"])))
        whole = len(kept.mesh) == len(MESH_AXES) and set(dict(kept.knobs)) == set(KNOBS)
        return kept if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def slice_of(devices: Sequence[jax.Device]) -> Slice:
    """The slice that `devices` are; emulated ones stand for a v3 slice of their number.

    Raises:
      ConfigError: the vendor has no slice of so many devices.
    """
    generation = generation_of(devices[0].device_kind)
    name = generation.name if generation else _REHEARSED
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    known = generation or parse_slice(f"{name}-8").generation
    if generation is None and len(devices) not in known.offered:
        sizes = " or ".join(map(str, list(known.offered)[:2]))
        raise ConfigError(
            "mesh.emulate", len(devices), f"there is no {name} slice of so many cores to plan for.",
            f"Use {sizes}.",
        )  # fmt: skip
    cores = len(devices) // slices * known.cores_per_chip // known.devices_per_chip
    return parse_slice(f"{slices}x{name}-{cores}" if slices > 1 else f"{name}-{cores}", "mesh.auto")
