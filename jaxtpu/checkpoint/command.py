"""`run.py checkpoints`: what a run has saved, whether it is whole, and what can go."""

import datetime

from jaxtpu.checkpoint import manifest
from jaxtpu.checkpoint.store import Checkpoints
from jaxtpu.config import Config
from jaxtpu.errors import EXIT_CRASH, EXIT_OK, ConfigError


def show(config: Config, verify: bool, prune: bool) -> int:
    """Prints a line a checkpoint, and deletes what the config does not keep if asked to.

    Args:
      verify: whether every file is read and compared with the manifest.
      prune: whether damaged, unfinished and set-aside ones are deleted, and those beyond
        `checkpoint.keep_last`, `keep_every` and `keep_best`.

    Returns:
      Exit code: 1 where a checkpoint is not whole and stays.
    """
    checkpoints = Checkpoints(config.workdir, config.checkpoint)
    try:
        if not checkpoints.directory.is_dir():
            raise ConfigError(
                "--workdir", config.workdir, f"has no checkpoints in {checkpoints.directory}.",
                "Train first.",
            )  # fmt: skip
        return _show(checkpoints, verify or prune, prune)
    finally:
        checkpoints.close()


def _show(checkpoints: Checkpoints, verify: bool, prune: bool) -> int:
    folders = sorted(
        (path for path in checkpoints.directory.iterdir() if path.is_dir()),
        key=lambda path: (int(n) if (n := path.name.split(".")[0]).isdigit() else -1, path.name),
    )
    bad = []
    for path in folders:
        finished = path.name.isdigit() and manifest.is_finished(path)
        found = manifest.faults(path) if verify and path.name.isdigit() else []
        if not finished or found:
            bad.append(path)
        print(f"{path.name:<12}{_described(checkpoints, path, finished, found, verify)}")
    if not folders:
        print("none")
    if prune:
        for path in bad:
            path.rmtree()
            print(f"deleted {path}")
        for step in checkpoints.prune():
            print(f"deleted {checkpoints.directory / str(step)}")
    return EXIT_CRASH if bad and not prune else EXIT_OK


def _described(checkpoints: Checkpoints, path, finished: bool, found: list[str], verify: bool):
    if not path.name.isdigit():
        return "set aside, or left by a run that was killed"
    if not finished:
        return "unfinished: its save was cut short; it is not used"
    if found:
        return "DAMAGED: " + "; ".join(found)
    try:
        run = checkpoints.read_run(int(path.name))
        when = datetime.datetime.fromtimestamp(run["time"]).strftime("%Y-%m-%d %H:%M:%S")
        metric = "" if run["metric"] is None else f"  validation metric {run['metric']:.4f}"
    except (OSError, ValueError, KeyError) as error:
        return f"DAMAGED: its description cannot be read: {error}"
    size = sum(size for size, _ in manifest.listed(path).values())
    return f"{when}  {size / 2**20:,.1f} MiB  {'whole' if verify else 'finished'}{metric}"
