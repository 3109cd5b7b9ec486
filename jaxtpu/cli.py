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
from jaxtpu.usage import USAGE

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
    config = _load(spec, overrides)
    base = _load(spec, []) if any(name.startswith("model.") for name, _ in overrides) else None
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


def _load(spec: str, overrides: list[tuple[str, str]]) -> Config:
    """The configuration, with what the weights that it starts from say of the model."""
    config = load(spec, overrides)
    if config.weights:
        from jaxtpu.interop.folder import adopt_weights

        adopt_weights(config)
    return config


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


def _evaluate(arguments: list[str]) -> int:
    options = parse(arguments, {"--workdir": str, "--split": str, "--task": str})
    config = _config_of_run(options["workdir"])
    environment.prepare(config.mesh.emulate)
    from jaxtpu.evaluation import evaluate_run

    return evaluate_run(config, options["split"], options["task"])


def _debug_step(arguments: list[str]) -> int:
    spec, overrides, rest = split_arguments(arguments)
    options = parse([*rest, *([f"--config={spec}"] if spec else [])], {"--workdir": str})
    config = _config_of_run(options["workdir"], overrides)
    environment.prepare(config.mesh.emulate)
    from jaxtpu.debug import debug_step

    return debug_step(config)


def _import(arguments: list[str]) -> int:
    spec, overrides, rest = split_arguments(arguments)
    options = parse(rest, {"--from": str, "--workdir": str})
    if not options["from"]:
        raise ConfigError("--from", "", "is missing.", "For example: --from=models/llama")
    from jaxtpu.interop.folder import config_for

    config = config_for(options["from"], load(spec, overrides) if spec else None, overrides)
    config.workdir = config.workdir if options["workdir"] is None else options["workdir"]
    _check_workdir(config.workdir)
    environment.prepare(config.mesh.emulate)
    from jaxtpu.convert import import_run

    return import_run(config, options["from"])


def _export(arguments: list[str]) -> int:
    options = parse(arguments, {"--workdir": str, "--to": str, "--dtype": str})
    config = _config_of_run(options["workdir"])
    if not options["to"]:
        raise ConfigError("--to", "", "is missing.", "For example: --to=exported")
    _check_folder("--to", options["to"], "For example: --to=exported")
    environment.prepare(config.mesh.emulate)
    from jaxtpu.convert import export_run

    return export_run(config, options["to"], options["dtype"])


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
    config = _load(spec, overrides)
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


def _config_of_run(workdir: str | None, overrides: list[tuple[str, str]] | None = None) -> Config:
    if not workdir:
        raise ConfigError("--workdir", "", "is missing.", "For example: --workdir=runs/quickstart")
    path = pathlib.Path(workdir).expanduser() / "config.json"
    if not path.is_file():
        known = ", ".join(str(p.parent) for p in sorted(pathlib.Path("runs").glob("*/config.json")))
        raise ConfigError("--workdir", workdir, "holds no run.", f"There are: {known or 'none'}.")
    config = load(str(path), overrides or [])
    config.workdir = workdir
    return config


def _help(arguments: list[str]) -> int:
    if arguments not in ([], ["config"]):
        raise ConfigError("run.py help", " ".join(arguments), "is not a topic.", "Use config.")
    print(config_help() if arguments else USAGE, end="")
    return EXIT_OK


_VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "plan": _plan,
    "checkpoints": _checkpoints,
    "generate": _generate,
    "evaluate": _evaluate,
    "debug-step": _debug_step,
    "import": _import,
    "export": _export,
    "tokenizer": _tokenizer,
    "help": _help,
}


def _command(arguments: list[str]) -> str:
    return shlex.join(["python", "run.py", *arguments])
