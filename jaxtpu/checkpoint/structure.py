"""What a checkpoint holds, by name and shape, compared with what is wanted of it."""

from typing import Any

from jaxtpu.errors import EXIT_BAD_CONFIG, UserError
from jaxtpu.paths import flatten

_SHOWN = 8  # names of a kind in a message

Structure = dict[str, tuple[list[int], str]]


class MismatchError(UserError):
    """A checkpoint of another model or optimizer: which names are missing, unexpected, reshaped."""

    exit_code = EXIT_BAD_CONFIG


def structure_of(tree: Any) -> Structure:
    """(shape, dtype) of each leaf, by path; as JSON holds it."""
    return {path: (list(leaf.shape), str(leaf.dtype)) for path, leaf in flatten(tree).items()}


def check_structure(found: Structure, wanted: Structure, where: str) -> None:
    """Both have the same names and shapes; dtypes are converted.

    Raises:
      MismatchError: they have not.
    """
    reshaped = [
        f"{name} {tuple(found[name][0])}, here {tuple(wanted[name][0])}"
        for name in wanted
        if name in found and list(found[name][0]) != list(wanted[name][0])
    ]
    kinds = {
        "missing from it": [f"{n} {tuple(wanted[n][0])}" for n in wanted if n not in found],
        "unexpected in it": [f"{n} {tuple(found[n][0])}" for n in found if n not in wanted],
        "of another shape": reshaped,
    }
    if any(kinds.values()):
        lines = [f"  {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
        raise MismatchError(
            "\n".join([f"{where} is of another model or optimizer:", *lines])
            + "\nUse the config that it was saved with, or take parameters that fit with "
            "checkpoint.init_from and checkpoint.init_params in another --workdir."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
