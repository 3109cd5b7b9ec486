"""What a run ends with: a table of its results, commands to go on, and a sample of its text."""

import math
import shlex
from typing import Any

from rich.console import Console

from jaxtpu.config import Config
from jaxtpu.data.entropy import byte_entropies
from jaxtpu.data.order import Position
from jaxtpu.data.streams import learns_answers, words_read
from jaxtpu.generate import generate
from jaxtpu.observe import console as screen
from jaxtpu.observe.tables import closing_rows
from jaxtpu.setup import Setup

_SAMPLE_PROMPT = "def "
_SAMPLE_TOKENS = 200


def tokens_per_byte(stream: Any) -> float:
    """NaN where the text is not known, or only parts of it are learned."""
    known = stream.num_bytes and not learns_answers(stream)
    return stream.num_tokens / stream.num_bytes if known else math.nan


def longer_command(command: str, config: Config, steps: int) -> str:
    """The command that trains for twice as many steps."""
    lengths = ("--config.train.steps=", "--config.train.epochs=")
    words = [word for word in shlex.split(command) if not word.startswith(lengths)]
    words += ["--config.train.epochs=None"] if config.train.epochs else []
    return shlex.join([*words, f"--config.train.steps={2 * steps}"])


def closing_table(
    out: Console,
    setup: Setup,
    position: Position,
    latest: dict[str, float],
    memory: Any,
    places: list[tuple[str, str]],
    longer: str,
) -> None:
    """Prints the results, where they are, and the commands that go on from there.

    Args:
      position: of the data, after the last step.
      latest: the last value of each metric.
      memory: as `peak_memory` gives it.
      places: where results are, by name.
      longer: the command that trains for longer.
    """
    config = setup.config
    is_bytes = hasattr(setup.validation, "tokens") and setup.tokenizer.name == "bytes"
    is_bytes = is_bytes and not learns_answers(setup.validation)
    validation = setup.stream if setup.validation is None else setup.validation
    read = words_read(setup.stream, position.taken, position.examples, config.data.sequence_length)
    rows = closing_rows(
        latest,
        byte_entropies(setup.validation) if is_bytes else None,
        tokens_per_byte(validation),
        memory,
        [("examples", read), *places],
    )
    screen.table(out, f"{config.name}: {setup.units.steps} steps", rows)
    commands = [("To train longer", longer)]
    if setup.tokenizer is not None:
        folder = shlex.quote(config.workdir)
        generation = f'python run.py generate --workdir={folder} --prompt="def "'
        commands.append(("To generate", generation))
    screen.commands(out, commands)


def write_sample(out: Console, setup: Setup, params: Any) -> None:
    """Prints a sample of what the model writes, where its sequence has room for one."""
    length = setup.config.data.sequence_length
    room = length - len(_SAMPLE_PROMPT) - 1
    if room <= 0:
        return
    text = generate(
        setup.programs,
        params,
        setup.tokenizer,
        prompt=_SAMPLE_PROMPT,
        max_tokens=min(_SAMPLE_TOKENS, room),
        length=length,
    )
    out.print("\na sample:", style="bold")
    out.print(screen.printable(text), markup=False)
