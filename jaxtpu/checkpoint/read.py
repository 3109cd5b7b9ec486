"""Reading checkpoints: onto any mesh, in other dtypes, or parts of them."""

import contextlib
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp

from jaxtpu.checkpoint.folder import Folder
from jaxtpu.checkpoint.structure import Structure, check_structure, structure_of
from jaxtpu.errors import UserError
from jaxtpu.paths import flatten

# Orbax logs every failure with its whole stack before it raises it; what it raises is told below.
absl.logging.set_verbosity(absl.logging.FATAL)


class SavedRun(Folder):
    """The checkpoints of one run, to be read."""

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """(state, position) of a step (default the newest whole one), laid out as `abstract_state`
        says, whatever mesh it was saved from, and in its dtypes.

        Raises:
          MismatchError: it is of another model or optimizer.
          UserError: it cannot be read.
        """
        step = self.newest_whole() if step is None else step
        where = f"the checkpoint of step {step} in {self.directory}"
        check_structure(self._structure(step), structure_of(abstract_state), where)
        return self._read(step, abstract_state), self.read_position(step)

    def restore_params(self, abstract_params: Any, step: int | None = None) -> Any:
        """The parameters alone, without the optimizer state, in the dtypes of `abstract_params`."""
        step = self.newest_whole(set_aside=False) if step is None else step
        where = f"the checkpoint of step {step} in {self.directory}"
        check_structure(self.params_structure(step), structure_of(abstract_params), where)
        return self._read(step, {"params": abstract_params})["params"]

    def restore_evaluated(self, abstract_state: Any, step: int) -> Any:
        """What `TrainState.evaluated` gives, without the rest of the state."""
        parts = {"model_state": abstract_state.model_state, "average": abstract_state.average}
        wanted = {name: part for name, part in parts.items() if part is not None}
        if "average" not in wanted:
            wanted["params"] = abstract_state.params
        everything = self._structure(step)
        prefixes = tuple(f"{name}/" for name in wanted)
        found = {path: leaf for path, leaf in everything.items() if path.startswith(prefixes)}
        where = f"the checkpoint of step {step} in {self.directory}"
        check_structure(found, structure_of(wanted), where)
        read = self._read(step, wanted)
        empty = {"params": None} | dict.fromkeys(parts)
        return abstract_state.replace(**(empty | read)).evaluated()

    def restore_some(self, abstract: dict[str, Any], step: int) -> dict[str, Any]:
        """Some parameters, by path."""
        nested: dict[str, Any] = {}
        for path, leaf in abstract.items():
            *folders, name = path.split("/")
            inner = nested
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = leaf
        return flatten(self._read(step, {"params": nested})["params"])

    def params_structure(self, step: int) -> Structure:
        """Shapes and dtypes of the parameters, by path."""
        found = self._structure(step).items()
        return {n.removeprefix("params/"): v for n, v in found if n.startswith("params/")}

    def _structure(self, step: int) -> Structure:
        return {name: tuple(leaf) for name, leaf in self.read_run(step)["structure"].items()}

    def _read(self, step: int, abstract: Any) -> Any:
        """Arrays of the state: those that `abstract` has."""
        arguments = jax.tree.map(
            lambda leaf: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            abstract,
        )
        path = self.directory / str(step) / "state"
        with self._told(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(
                path,
                ocp.args.PyTreeRestore(abstract, restore_args=arguments, partial_restore=True),
            )

    @contextlib.contextmanager
    def _told(self, step: int):
        """What Orbax raises for a file it cannot read, as a message with what is left.

        Orbax raises whatever its layers raise, so every exception is taken, and kept as the cause.
        """
        try:
            yield
        except Exception as error:
            others = ", ".join(str(other) for other in self.steps if other != step)
            left = f"there are those of steps {others}" if others else "none is left"
            raise UserError(
                f"could not restore the checkpoint of step {step} in {self.directory}: "
                f"{reason(error)}\nOf other checkpoints, {left}."
            ) from error

    def read_position(self, step: int) -> dict[str, Any]:
        """The data position as JSON values."""
        with self._told(step), ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            return reader.restore(self.directory / str(step) / "data")


def reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
