"""The command line: verbs, their options, and errors as one message with an exit code."""

import errno
import os
import pathlib
import shlex
import sys
from collections.abc import Callable

from jaxtpu import environment
from jaxtpu.config import Config, load, split_arguments
from jaxtpu.config.help import config_help
from jaxtpu.errors import EXIT_CRASH, EXIT_OK, ConfigError, UserError, nearest
from jaxtpu.options import meant_as_config, parse

_USAGE = """\
jaxtpu: trains large models on TPU slices with little memory per core.

  python run.py --config=FILE [--config.FIELD=VALUE ...] [--workdir=DIR]
      Train, or resume the run in DIR (default: runs/<name of the config>).
      FILE is a Python file with get_config(), FILE:ARG passes it an argument,
      or the config.json that a run left behind.
      Where there are several processes, all run the same command: those of a Cloud TPU slice,
      GKE and SLURM find each other; by hand, each adds
      --coordinator=HOST:PORT --processes=N --process_id=I.
  python run.py checkpoints --workdir=DIR [--verify] [--prune]
      List what a run has saved; read and verify all of it; delete what is damaged or not kept.
  python run.py plan --config=FILE --slice=SLICE[,SLICE ...] [--hbm_gib=N] [--tokens=N]
                     [--open=FIELD,...] [--compiles=N]
      What fits on a slice, how fast it runs and what it costs, decided by the TPU compiler
      with no TPU: --slice=v3-8, v3-32, v5e-16, 2xv3-32, ... Mesh, remat, attention and
      microbatches are tried, but for what FILE or the command line sets; --open=mesh tries
      others all the same. --hbm_gib is the budget of a device, --tokens the length of the
      training to price. Writes plans/<name>/.
  python run.py plan --validate
      Predicted speeds beside published measurements, and the time model's constants.
  python run.py plan --update-goldens
      Compile the recorded train steps again and record what changed.
  python run.py generate --workdir=DIR [--prompt=TEXT] [--tokens=N] [--temperature=T] [--seed=N]
      Write text with the latest checkpoint of a run.
  python run.py tokenizer --config=FILE --vocab_size=N --to=DIR
      Train a byte-level BPE tokenizer on the training split, for data.tokenizer=hf:DIR.
  python run.py help [config]
      This text; with `config`, every field of a configuration.

Without an accelerator, CPU devices are emulated (mesh.emulate, 8 by default).
Exit codes: 0 done, 1 failed, 2 wrong configuration or command line,
3 no plan fits, 4 the watchdog ended a process that waited too long (start it again),
5 the last checkpoint could not be saved, 130 or 143 stopped by Ctrl-C or SIGTERM after saving.
"""

# Of the machine, not of this project: told in a line.
_MACHINE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
                   errno.ENOTDIR, errno.ENAMETOOLONG)  # fmt: skip


def main(argv: list[str]) -> int:
    """Runs a command line (without the program's name); returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # a locale without these characters ends no run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return _dispatch(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # what read our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CRASH
    except OSError as error:
        if error.errno not in _MACHINE_FAULTS:
            raise
        print(f"error: {error.strerror}: {error.filename or 'a file'}", file=sys.stderr)
        return EXIT_CRASH
    except KeyboardInterrupt:
        kept = "nothing was saved since the last checkpoint"
        if argv[:1] == ["plan"]:
            kept = "what was compiled is kept, and the same command goes on from there"
        print(f"\nInterrupted; {kept}.", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    verb, arguments = (
        (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("train", argv)
    )
    if verb in _VERBS and any(word in ("-h", "--help") for word in arguments):
        verb, arguments = "help", []
    if verb not in _VERBS:
        hint = meant_as_config(verb) or nearest(verb, _VERBS)
        raise ConfigError("run.py", verb, "is not a verb.", hint)
    return _VERBS[verb](arguments)


def _train(arguments: list[str]) -> int:
    spec, overrides, rest = split_arguments(arguments)
    place = {"--coordinator": str, "--processes": int, "--process_id": int}
    options = parse(rest, {"--workdir": str} | place)
    if spec is None:
        raise ConfigError(
            "--config", "", "is missing.", "For example: --config=configs/quickstart.py"
        )
    config = load(spec, overrides)
    base = load(spec) if any(name.startswith("model.") for name, _ in overrides) else None
    if options["workdir"] is not None:
        config.workdir = options["workdir"]
    _check_workdir(config.workdir)
    environment.prepare(config.mesh.emulate)
    from jaxtpu import processes, trainer  # they import JAX, which reads what was just prepared

    place = {name: options[name] for name in ("coordinator", "processes", "process_id")}
    with processes.joined(processes.Place(**place), config.watchdog.start):
        return trainer.train(config, _command(arguments), {name for name, _ in overrides}, base)


def _checkpoints(arguments: list[str]) -> int:
    flags = [word for word in arguments if word in ("--verify", "--prune")]
    options = parse([word for word in arguments if word not in flags], {"--workdir": str})
    config = _config_of_run(options["workdir"])
    environment.prepare(1, platform="cpu")
    from jaxtpu.checkpoint.command import show

    return show(config, "--verify" in flags, "--prune" in flags)


def _check_workdir(workdir: str) -> None:
    if not workdir:
        raise ConfigError("--workdir", "", "is empty.", "For example: --workdir=runs/quickstart")
    if hidden := set("*?[") & set(str(pathlib.Path(workdir).expanduser().absolute())):
        raise ConfigError(
            "--workdir", workdir, f"checkpoints are not found below a path with {min(hidden)!r}.",
            "For example: --workdir=runs/quickstart",
        )  # fmt: skip
    _check_folder("--workdir", workdir, "For example: --workdir=runs/quickstart")


def _check_folder(field: str, name: str, advice: str) -> None:
    """A folder that cannot be written is told now, and not when the first result is there."""
    folder = pathlib.Path(name).expanduser().absolute()
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(field, name, f"{above} is not a folder that can be written.", advice)


def _generate(arguments: list[str]) -> int:
    kinds = {
        "--workdir": str,
        "--prompt": str,
        "--tokens": int,
        "--temperature": float,
        "--seed": int,
    }
    options = parse(arguments, kinds)
    config = _config_of_run(options["workdir"])
    environment.prepare(config.mesh.emulate)
    from jaxtpu.generate import generate_from
    from jaxtpu.observe.console import printable

    text = generate_from(
        config,
        options["prompt"] or "",
        200 if options["tokens"] is None else options["tokens"],
        0.7 if options["temperature"] is None else options["temperature"],
        options["seed"] or 0,
    )
    print(printable(text))
    return EXIT_OK


def _tokenizer(arguments: list[str]) -> int:
    spec, overrides, rest = split_arguments(arguments)
    options = parse(rest, {"--vocab_size": int, "--to": str})
    for name, value, example in (
        ("--config", spec, "configs/quickstart.py"),
        ("--vocab_size", options["vocab_size"], "8192"),
        ("--to", options["to"], "tokenizers/python"),
    ):
        if not value:
            raise ConfigError(name, "", "is missing.", f"For example: {name}={example}")
    _check_folder("--to", options["to"], "For example: --to=tokenizers/python")
    config = load(spec, overrides)
    environment.prepare(1, platform="cpu")
    from jaxtpu.data.train_tokenizer import train_tokenizer
    from jaxtpu.observe.console import make_console

    hidden = not sys.stderr.isatty()
    return train_tokenizer(config, options["vocab_size"], options["to"], make_console(), hidden)


def _plan(arguments: list[str]) -> int:
    spec, overrides, rest = split_arguments(arguments)
    kinds = {
        "--slice": str,
        "--hbm_gib": float,
        "--tokens": float,
        "--open": str,
        "--compiles": int,
    }
    flags = [word for word in rest if word in ("--validate", "--update-goldens")]
    options = parse([word for word in rest if word not in flags], kinds)
    environment.prepare(1, platform="cpu")  # shapes only: the compiler runs in other processes
    if flags:
        return _plan_without_config(flags, arguments)
    for name, value, example in (
        ("--config", spec, "configs/lm_1b.py"),
        ("--slice", options["slice"], "v3-8"),
    ):
        if not value:
            raise ConfigError(name, "", "is missing.", f"For example: {name}={example}")
    for name in ("hbm_gib", "tokens", "compiles"):
        if options[name] is not None and not options[name] > 0:
            raise ConfigError(f"--{name}", options[name], "must be positive.", "Leave it out.")
    config = load(spec, overrides)
    written = f"plans/{config.name}"
    _check_folder("run.py plan", written, "Run it where you may write, or set --config.name.")
    from jaxtpu.plan.command import plan

    return plan(
        config,
        options["slice"],
        given={name for name, _ in overrides},
        opened={name.strip() for name in (options["open"] or "").split(",") if name.strip()},
        hbm_gib=options["hbm_gib"],
        tokens=options["tokens"],
        compiles=4 if options["compiles"] is None else options["compiles"],
    )


def _plan_without_config(flags: list[str], arguments: list[str]) -> int:
    """`plan --validate` and `plan --update-goldens`: what there is to compile is recorded."""
    if len(arguments) > 1:
        raise ConfigError(
            "run.py plan", " ".join(arguments), f"{flags[0]} takes nothing beside it.",
            f"Use: python run.py plan {flags[0]}",
        )  # fmt: skip
    from jaxtpu.observe.console import make_console
    from jaxtpu.plan import goldens, validate

    verbs = {"--validate": validate.validate, "--update-goldens": goldens.update}
    return verbs[flags[0]](make_console())


def _config_of_run(workdir: str | None) -> Config:
    if not workdir:
        raise ConfigError("--workdir", "", "is missing.", "For example: --workdir=runs/quickstart")
    path = pathlib.Path(workdir).expanduser() / "config.json"
    if not path.is_file():
        known = ", ".join(str(p.parent) for p in sorted(pathlib.Path("runs").glob("*/config.json")))
        raise ConfigError("--workdir", workdir, "holds no run.", f"There are: {known or 'none'}.")
    config = load(str(path))
    config.workdir = workdir
    return config


def _help(arguments: list[str]) -> int:
    if arguments not in ([], ["config"]):
        raise ConfigError("run.py help", " ".join(arguments), "is not a topic.", "Use config.")
    print(config_help() if arguments else _USAGE, end="")
    return EXIT_OK


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "checkpoints": _checkpoints,
    "generate": _generate,
    "tokenizer": _tokenizer,
    "help": _help,
}


def _command(arguments: list[str]) -> str:
    return shlex.join(["python", "run.py", *arguments])
