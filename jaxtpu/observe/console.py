"""What a person sees: a progress bar on a terminal, plain lines elsewhere, tables."""

import contextlib
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_PLAIN_WIDTH = 110


def make_console(shown: bool = True) -> Console:
    """Standard output; plain text of a fixed width where that is not a terminal.

    Args:
      shown: False for a process whose lines another one prints.
    """
    terminal = sys.stdout.isatty() and shown
    return Console(
        width=None if terminal else _PLAIN_WIDTH,
        highlight=False,
        soft_wrap=not terminal,
        quiet=not shown,
    )


def commands(console: Console, rows: list[tuple[str, str]]) -> None:
    """Prints (what for, command) so that each command can be copied whole."""
    console.print()
    for purpose, command in rows:
        console.print(f"{purpose}: {command}", markup=False, soft_wrap=True)


def table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    """Prints (what, value) rows under a title; a line each where output is not a terminal."""
    console.print(f"\n{title}", style="bold", markup=False)
    if not console.is_terminal:
        width = max(len(name) for name, _ in rows) + 2
        for name, value in rows:
            console.print(f"{name:<{width}}{value}", markup=False)
        return
    grid = Table(show_header=False, box=None, pad_edge=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    console.print(grid)


@contextlib.contextmanager
def busy(console: Console, what: str):
    """A spinner on a terminal while something takes long; the time it took, afterwards."""
    start = time.perf_counter()
    status = console.status(f"{what} ...") if console.is_terminal else contextlib.nullcontext()
    with status:
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", markup=False)


class StepDisplay:
    """Shows training metrics: a bar under the latest numbers, or a line each interval."""

    def __init__(self, console: Console, start: int, steps: int):
        self._console, self._start, self._steps = console, start, steps
        self._began, self._live = time.perf_counter(), None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._task = self._bar.add_task("", total=steps, completed=start)
            self._live = Live(self._bar, console=console, refresh_per_second=4)
            self._live.start()

    def advance(self, step: int) -> None:
        """A step was dispatched."""
        if self._live:
            self._bar.update(self._task, completed=step)

    def show(self, step: int, values: dict[str, float]) -> None:
        """Metrics of training (`train/...`, `speed/...`, `memory/...`)."""
        numbers = describe(values)
        if self._live:
            self._live.update(Group(Text(numbers), self._bar))
            return
        done = max(1, step - self._start)
        left = (time.perf_counter() - self._began) / done * (self._steps - step)
        self.note(f"step {step}/{self._steps}  {numbers}  left {duration(left)}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def describe(values: dict[str, float]) -> str:
    """The numbers of one log interval on one line."""
    forms = (
        ("train/loss", "loss {:.4f}"),
        ("train/bits_per_byte", "bits/byte {:.3f}"),
        ("train/accuracy", "accuracy {:.3f}"),
        ("train/grad_norm", "grad {:.2f}"),
        ("train/dropped_updates", "dropped {:.0f}"),
        ("train/learning_rate", "lr {:.1e}"),
        ("speed/tokens_per_second", "{:,.0f} tok/s"),
        ("speed/examples_per_second", "{:,.0f} images/s"),
        ("speed/mfu", "MFU {:.1%}"),
        ("memory/peak_gib", "mem {:.2f} GiB"),
    )
    return "  ".join(form.format(values[name]) for name, form in forms if name in values)


def duration(seconds: float) -> str:
    """75 as `1:15`, 4000 as `1:06:40`."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def count(number: float) -> str:
    """1234567 as `1.23 M`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.3g}"


def size(num_bytes: float) -> str:
    """Bytes in binary units."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def printable(text: str) -> str:
    """`text` without control characters, which a model may emit and a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
