"""When a real run is out of memory: which program it was, and what to do about it."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
from rich.console import Console

from jaxtpu.config import Config, RunUnits
from jaxtpu.errors import UserError
from jaxtpu.hardware import generation_of
from jaxtpu.plan.auto import slice_of
from jaxtpu.plan.candidates import candidate_of
from jaxtpu.plan.compile_cache import has_compiler
from jaxtpu.plan.explain import explain, show_explanation
from jaxtpu.plan.progress import progress

_MARK = "RESOURCE_EXHAUSTED"


class OutOfMemoryError(UserError):
    """A program of a run does not fit.

    Attributes:
      program: which, in words.
    """

    def __init__(self, program: str, message: str):
        super().__init__(f"out of memory in {program}: {message}")
        self.program = program


@contextlib.contextmanager
def naming(program: str) -> Iterator[None]:
    """What runs out of memory inside is told as `program`.

    Raises:
      OutOfMemoryError: in place of JAX's own.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _MARK not in str(error):
            raise
        raise OutOfMemoryError(program, str(error).strip().splitlines()[0]) from error


def explain_run(
    out: Console,
    config: Config,
    units: RunUnits,
    vocab_size: int,
    devices: Sequence[jax.Device],
) -> None:
    """Prints why the train step of a run does not fit, and compiled changes that do.

    Nothing is printed but a hint where the devices are no TPUs or the compiler is not installed.

    Args:
      config: of the run, finalized.
      units: of the run.
      devices: that it ran on.
    """
    if generation_of(devices[0].device_kind) is None or not has_compiler():
        out.print(
            "Less memory: a larger train.microbatches, model.remat=full, a smaller data.batch_size.",
            markup=False,
        )
        return
    slice_ = slice_of(devices)
    limit = slice_.generation.hbm_limit_gib or slice_.generation.hbm_gib
    with progress(out, "explaining") as on_progress:
        explanation = explain(
            config,
            candidate_of(config, slice_),
            slice_,
            units,
            hbm_gib=limit,
            vocab_size=vocab_size,
            on_progress=on_progress,
        )
    show_explanation(out, explanation, limit)
