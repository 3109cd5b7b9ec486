"""Progress of what takes minutes: (what, number done, number in all)."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress(out: Console, name: str) -> Iterator[OnProgress]:
    """A bar on a terminal, elsewhere a line for each thing that is begun."""
    if not out.is_terminal:
        begun = set()

        def say(what: str, done: int, total: int) -> None:
            if what not in begun:
                begun.add(what)
                out.print(f"{name}: {what}, {total} in all", markup=False)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(name)

        def update(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {what}", completed=done, total=total)

        yield update
