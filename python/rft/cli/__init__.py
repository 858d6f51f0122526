"""The command line: arguments in, one call out. Every command is a module of its own, imported when it is used.

`rft --help` reads the table below and imports neither typer nor torch. A command's module has `command(...)` with typer's
annotations, `commands = {"name": (function, help)}` where it has several, or `run(arguments)` where the extension parses them. It returns None or an exit code and raises
RftError for what a user can mend. `-q` and `-v` are added here, to every command; arguments.py has what several share.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from inspect import Parameter, signature  # not the module: rft.cli.inspect takes its name here once it is imported
from typing import Annotated, Any

from rft import __version__, log
from rft.cli.start import Terminated, check_process, prepare_process
from rft.errors import ConfigError, RftError, Stopped, system_reason

COMMANDS = {
    "train": "Fine-tune a model as a TOML file says; run it again to resume",
    "plan": "Memory, speed and time before anything is loaded, with the reason for each choice",
    "prepare": "Tokenise, mask and store the data ahead of time",
    "data": "Prepared sets: list, verify, export, remove",
    "inspect": "Show samples as the model will see them",
    "verify": "Check parity on this config's own architecture",
    "eval": "Held-out loss of a run, an adapter or a model",
    "chat": "Talk to a run, an adapter or a model",
    "merge": "Merge an adapter into its base model",
    "config": "The resolved config, or the JSON Schema for editors",
    "doctor": "What this machine has and what rft will use of it",
    "quickstart": "A small real model on real text, offline, in minutes",
}
_TAKES_RANKS = {"train", "prepare", "verify", "eval", "quickstart"}
_LAUNCHES_OR_TALKS = {"train", "chat"}  # these turn library noise away themselves: see log.capture_noise

_USAGE = """\
rft {version} fine-tunes open-weight language models: a TOML file in, a trained model out.

usage: rft COMMAND [options]

{commands}

options, before or after the command:
  -q, --quiet    warnings and errors only
  -v, --verbose  details, library messages and tracebacks
  --help         this text; `rft COMMAND --help` for a command
  --version      the version

first run: rft quickstart      your own: rft train my.toml
"""


def main() -> None:
    """The `rft` command."""
    prepare_process()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()  # what others wrote to it (help texts), while it can still be told
    except BrokenPipeError:
        log.discard(sys.stdout)
    except OSError as error:
        log.discard(sys.stdout)
        code = code or _report(RftError("stdout", f"cannot be written: {system_reason(error)}"))
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line; returns the exit status (design: 0 done, 1 failed, 2 wrong config or input, 130/143 stopped)."""
    log.setup(verbosity=_verbosity(argv))
    try:
        return _dispatch(argv)
    except RftError as error:
        return _report(error)
    except KeyboardInterrupt as stop:  # while the command was being imported
        return _report(_stopped(stop))
    except BrokenPipeError:  # `rft ... | head`
        return 1
    except OSError as error:
        return _report_os_error(error)
    except Exception as error:
        return _report_bug(error)


# ---- finding the command


def _verbosity(argv: list[str]) -> int:
    """From the whole line, so that -v shows the traceback of an error made by any argument."""
    flags = argv[: argv.index("--")] if "--" in argv else argv
    if "-v" in flags or "--verbose" in flags:
        return 1
    return -1 if "-q" in flags or "--quiet" in flags else 0


def _dispatch(argv: list[str]) -> int:
    rest = list(argv)
    leading = []
    while rest and rest[0].startswith("-"):
        leading.append(rest.pop(0))
    for flag in leading:
        if flag in ("--help", "-h"):
            return _print_usage()
        if flag in ("--version", "-V"):
            log.output(f"rft {__version__}\n")
            return 0
        if flag not in ("-q", "--quiet", "-v", "--verbose"):
            raise ConfigError(
                "rft", f"unknown option {flag}", do="put a command's options behind it; `rft --help` lists all"
            )
    if not rest:
        _print_usage()
        return 2
    name, *args = rest
    if name == "help":
        return _dispatch([*args[:1], "--help"])
    if name not in COMMANDS:
        raise _unknown_command("rft", name, list(COMMANDS))
    check_process(ranks=name in _TAKES_RANKS and "--help" not in args)
    module = importlib.import_module(f"rft.cli.{name}")
    if hasattr(module, "run"):  # parses its arguments itself
        code: int = module.run(args)
        return code
    if not hasattr(module, "commands"):
        return _invoke(f"rft {name}", module.command, args, quiet_libraries=name not in _LAUNCHES_OR_TALKS)
    names = [arg for arg in args if not arg.startswith("-")]
    if not names:
        _print_group(f"rft {name}", COMMANDS[name], module.commands)
        return 0 if "--help" in args else 2
    if names[0] not in module.commands:
        raise _unknown_command(f"rft {name}", names[0], list(module.commands))
    args.remove(names[0])
    return _invoke(f"rft {name} {names[0]}", module.commands[names[0]][0], args, quiet_libraries=True)


def _unknown_command(program: str, name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    problem = f"unknown command {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    if name.endswith(".toml"):
        return ConfigError(program, problem, do=f"rft train {name}")
    return ConfigError(program, problem, wanted=", ".join(known))


def _print_usage() -> int:
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:{width}}{text}" for name, text in COMMANDS.items())
    log.output(_USAGE.format(version=__version__, commands=lines))
    return 0


def _print_group(program: str, text: str, commands: dict[str, tuple[Callable[..., Any], str]]) -> None:
    width = max(map(len, commands)) + 2
    lines = "\n".join(f"  {name:{width}}{text}" for name, (_, text) in commands.items())
    log.output(f"{text}\n\nusage: {program} COMMAND [options]\n\n{lines}\n")


# ---- calling it


def _invoke(program: str, function: Callable[..., Any], args: list[str], *, quiet_libraries: bool) -> int:
    import typer
    import typer.main

    # UsageError: where it lives differs between versions of typer
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]  # type: ignore[assignment]
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(_with_verbosity(function, quiet_libraries))
    command = typer.main.get_command(app)
    try:
        with _help_through_log() if "--help" in args else contextlib.nullcontext():
            result = command.main(args=args, prog_name=program, standalone_mode=False)
    except usage_error as error:
        raise _wrong_usage(program, command, error) from None
    except typer.Abort:
        return 1
    return result if isinstance(result, int) else 0


@contextlib.contextmanager
def _help_through_log() -> Iterator[None]:
    """typer prints its help itself: where it cannot be written, that is told as of all other output."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield
    log.output(text.getvalue())


def _wrong_usage(program: str, command: Any, error: Any) -> ConfigError:
    """click's complaint as one of our blocks, with the nearest option."""
    given = getattr(error, "option_name", None)
    if given and type(error).__name__ == "NoSuchOption":
        known = [opt for param in command.params for opt in param.opts if opt.startswith("-")]
        close = difflib.get_close_matches(given, [*known, "--help"], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return ConfigError(program, f"unknown option {given}{hint}", do=f"`{program} --help` lists the options")
    message = error.format_message().rstrip(".")
    return ConfigError(program, message[:1].lower() + message[1:], do=f"`{program} --help` shows how it is called")


def _with_verbosity(function: Callable[..., Any], quiet_libraries: bool) -> Callable[..., Any]:
    """The function with -q and -v in its signature; `run` has read them already, from the whole line."""
    import typer

    quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.")]
    verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Details, library messages and tracebacks.")]

    @functools.wraps(function)
    def call(*args: Any, quiet: bool = False, verbose: bool = False, **kwargs: Any) -> Any:
        try:
            with log.capture_noise() if quiet_libraries else contextlib.nullcontext():
                return function(*args, **kwargs)
        except KeyboardInterrupt as stop:  # training has handlers of its own, which save first
            raise _stopped(stop) from None

    own = signature(function, eval_str=True)
    extra = [
        Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=quiet),
        Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=verbose),
    ]
    whole = own.replace(parameters=[*own.parameters.values(), *extra])
    call.__signature__ = whole  # type: ignore[attr-defined]
    call.__annotations__ = {name: parameter.annotation for name, parameter in whole.parameters.items()}
    return call


# ---- errors


def _stopped(stop: KeyboardInterrupt) -> Stopped:
    """Ctrl-C, or SIGTERM where nothing had begun that is worth saving."""
    if isinstance(stop, Terminated):
        return Stopped("", "by SIGTERM", exit_code=143)
    return Stopped("", "by Ctrl-C", exit_code=130)


def _report(error: RftError) -> int:
    if log.verbosity() > 0:
        log.trace(error)
    if isinstance(error, Stopped) and error.exit_code in (130, 143):  # as asked: no error
        log.stopped(str(error))
        return error.exit_code
    for one in (error, *error.others):
        log.error(str(one))
    return error.exit_code


def _report_os_error(error: OSError) -> int:
    """A full disk, a folder without permission: the user's to mend, whoever met it."""
    if log.verbosity() > 0:
        log.trace(error)
    place = f"{error.filename}: " if error.filename else ""
    lines = [f"{place}{system_reason(error)}"]
    if error.errno == errno.ENOSPC:
        lines.append(
            "do: free some space, then run the same command again: it goes on from the last complete checkpoint"
        )
    elif not error.filename:
        lines.append("do: add -v to see where")
    log.error("\n".join(lines))
    return 1


def _report_bug(error: Exception) -> int:
    """Not an error of the user's: everything that helps to mend it."""
    if isinstance(error, ImportError) and "_native" in str(error):
        log.error(
            f"rft._native: the data engine cannot be loaded: {error}\ndo: `make dev` builds it in a checkout; the wheel holds it"
        )
        return 1
    log.trace(error)
    log.error(
        f"{type(error).__name__}: this is a bug in rft\ndo: report it with the lines above and the last line of `rft doctor`"
    )
    return 1
