"""What the user sees, and `run.log`: lines with a label, one process speaking, library noise kept apart.

Our own lines go to the terminal and to run.log; what libraries print (warnings, progress bars, C++ messages) goes to run.log
alone, once `capture_noise` is active. Only rank 0 speaks unless a line says `all_ranks`. Values of secret-looking
environment variables never leave through here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rft.errors import RftError, system_reason
from rft.ranks import plain_number
from rft.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

LABEL_WIDTH = 9  # "declined" and a space: every label of ux.md fits
_SECRET_NAME = re.compile(r"token|secret|passw|credential|api_?key|access_?key|private_?key", re.IGNORECASE)
_STYLES = {"error": "31;1", "warning": "33;1"}


class _State:
    """The one console of the process."""

    def __init__(self) -> None:
        self.verbosity = 0
        self.rank = plain_number("RANK", 0)
        self.lines_to_stderr = False
        self.out: TextIO | None = None  # None = sys.stdout of the moment, so that capturing tests see it
        self.err: TextIO | None = None
        self.console: Console | None = None
        self.console_file: TextIO | None = None
        self.run_log: TextIO | None = None
        self.noise: Any = None  # the open file that libraries write into, while captured


_state = _State()


def setup(*, verbosity: int = 0, rank: int | None = None, lines_to_stderr: bool = False) -> None:
    """verbosity: -1 = warnings and errors only, 0, 1 = details and tracebacks. lines_to_stderr: stdout belongs to JSON."""
    _state.verbosity = verbosity
    _state.lines_to_stderr = lines_to_stderr
    _state.console = None
    if rank is not None:
        _state.rank = rank


def verbosity() -> int:
    """-1 quiet, 0, 1 verbose."""
    return _state.verbosity


def set_rank(rank: int) -> None:
    """Which rank this process is: only rank 0 speaks."""
    _state.rank = rank


def rank() -> int:
    """This process's rank: what `set_rank` said, else the launcher's RANK, else 0."""
    return _state.rank


# ---- lines


def say(label: str, text: str, *, all_ranks: bool = False) -> None:
    """`label` in a column of its own, then the text: `model    SmolLM2-135M-Instruct · 134.5 M parameters`."""
    _emit(label, text, at=0, all_ranks=all_ranks)


def line(text: str = "") -> None:
    """A line without a label."""
    _emit("", text, at=0, all_ranks=False)


def detail(label: str, text: str, *, all_ranks: bool = False) -> None:
    """Like `say`, on the terminal only under -v; in run.log always."""
    _emit(label, text, at=1, all_ranks=all_ranks)


def warn(text: str, *, do: str = "", all_ranks: bool = False) -> None:
    """Something that the user should know, and what to do about it; shown under -q too."""
    _emit("warning", f"{text}\ndo: {do}" if do else text, at=-1, all_ranks=all_ranks)


def error(text: str) -> None:
    """An error block on stderr, from any rank. `text`: lines, the first without a label."""
    _block("error", text)


def stopped(text: str) -> None:
    """As `error`, for an end that the user asked for: nothing is wrong."""
    _block("stopped", text)


def _block(label: str, text: str) -> None:
    _write_run_log(label, text)
    stream = _err()
    _write(stream, _layout(label, _safe(text), stream, width=len(label) + 2))


def record(label: str, text: str) -> None:
    """A line for run.log alone, such as the error that ends the run and is shown by whoever called."""
    _write_run_log(label, text)


def trace(error: BaseException) -> None:
    """The traceback of an exception, on stderr and in run.log."""
    import traceback

    text = "".join(traceback.format_exception(error)).rstrip()
    _write_run_log("traceback", text)
    _write(_err(), _safe(text) + "\n")


def _emit(label: str, text: str, *, at: int, all_ranks: bool) -> None:
    if _state.rank and not all_ranks:
        return
    if all_ranks and (_state.rank or plain_number("WORLD_SIZE", 1) > 1):
        text = f"rank {_state.rank}: {text}"
    _write_run_log(label, text)
    if _state.verbosity < at:
        return
    text = _safe(text)
    if _state.console is not None:  # a live view may be up: only its console can print above it
        stream = _state.console_file or _out()
        _state.console.out(_layout(label, text, stream).rstrip("\n"), highlight=False)
    else:
        stream = _err() if at < 0 else _out()
        _write(stream, _layout(label, text, stream))


def _layout(label: str, text: str, stream: TextIO, *, width: int = LABEL_WIDTH) -> str:
    """The label's column and the text behind it, its further lines indented; wrapped only on a terminal.

    Names of files and words from data pass here, and must not be able to drive the terminal.
    """
    lines = visible(text).split("\n")
    if is_terminal(stream):
        columns = max(40, os.get_terminal_size(stream.fileno()).columns)
        indent = width if label else 0
        lines = [part for line in lines for part in (textwrap.wrap(line, columns - indent, break_long_words=False,
                                                                   break_on_hyphens=False) or [""])]  # fmt: skip
    head = ""
    if label:
        head = label.ljust(width - 1) + " "
        if colour(stream):
            head = f"\x1b[{_STYLES.get(label, '1')}m{head}\x1b[0m"
    rest = " " * (width if label else 0)
    return "\n".join((head if i == 0 else rest) + part for i, part in enumerate(lines)).rstrip() + "\n"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings and errors only while it lasts: for parts of a command that say nothing of interest to the user."""
    before, _state.verbosity = _state.verbosity, min(_state.verbosity, -1)
    try:
        yield
    finally:
        _state.verbosity = before


def _safe(text: str) -> str:
    """A line of ours without secrets, and without what a terminal would obey: rows, names of files and exceptions of libraries hold anything."""
    return visible(mask(text))


# ---- streams


def _out() -> TextIO:
    return _err() if _state.lines_to_stderr else (_state.out or sys.stdout)


def _err() -> TextIO:
    return _state.err or sys.stderr


def open_closed_streams() -> None:
    """Streams that the caller has closed (`>&-`) lead nowhere, rather than to the first file that is opened. At start-up."""
    for fd, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, fd)
            if null != fd:
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115 - for the process's life


def stdout() -> TextIO:
    """The user's stdout, also while library noise is captured."""
    return _state.out or sys.stdout


def output(text: str) -> None:
    """Write what the user asked for (JSON, a config, generated text) to stdout as it is.

    Raises RftError where it cannot be written: there, nothing was done. A reader that has gone away (`| head`) is no error.
    """
    stream = stdout()
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(_encodable(text, stream))
        stream.flush()
    except BrokenPipeError:
        discard(stream)
    except OSError as error:
        discard(stream)
        raise RftError(
            "stdout",
            f"cannot be written: {system_reason(error)}",
            do="send it to another file, or free some space there",
        ) from None


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at it: colour, wrapping and a live view are for terminals."""
    stream = stream or _out()
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, ValueError, OSError):
        return False


def colour(stream: TextIO | None = None) -> bool:
    """Whether to colour: a terminal, and NO_COLOR (no-color.org) not set."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and is_terminal(stream)


def console() -> Console:
    """The one rich console, for live views and tables; from then on every line goes through it."""
    from rich.console import Console

    if _state.console is None or _state.console_file is not _out():
        _state.console_file = _out()
        _state.console = Console(file=_state.console_file, highlight=False, quiet=bool(_state.rank))
    return _state.console


def _write(stream: TextIO, text: str) -> None:
    """A line of ours. Where it cannot be written the command goes on: its result is on disk, and run.log has the line."""
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a terminal without UTF-8 still gets the words
            stream.write(_encodable(text, stream))
        stream.flush()
    except BrokenPipeError:  # `rft ... | head`: the reader has seen enough
        discard(stream)
    except OSError as error:
        discard(stream)
        if stream is not _err():
            warn(f"stdout cannot be written ({system_reason(error)}): nothing more is shown there")


def _encodable(text: str, stream: TextIO) -> str:
    encoding = stream.encoding or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def discard(stream: TextIO) -> None:
    """Whatever is still written to the stream leads nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


# ---- run.log


def open_run_log(path: str | Path) -> None:
    """From now on our lines and captured noise are appended to this file; noise so far is put there first. Any rank may call it."""
    close_run_log()
    _state.run_log = open(path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115 - open until the run ends
    if _state.noise is not None:
        _state.noise.move_to(_state.run_log)


def close_run_log() -> None:
    """End of the run: noise is kept in memory again."""
    if _state.run_log is not None:
        if _state.noise is not None:
            _state.noise.move_to(None)
        _state.run_log.close()
        _state.run_log = None


def _write_run_log(label: str, text: str) -> None:
    if _state.run_log is not None and not _state.run_log.closed:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # a full disk is reported by whoever saves something that matters
            _state.run_log.write(f"{stamp} {label.ljust(LABEL_WIDTH - 1)} {_safe(text)}\n")


class _Noise:
    """Descriptors 1 and 2, and what Python prints to them, turned away from the user; `restore` undoes it."""

    def __init__(self) -> None:
        self.saved_streams = sys.stdout, sys.stderr
        for stream in self.saved_streams:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        self.saved_fds = [_dup(fd) for fd in (1, 2)]
        self.early = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - open until restore
        self.target = self.early.fileno()
        self.point()
        self.python = io.TextIOWrapper(
            io.BufferedWriter(_FdWriter(self)), encoding="utf-8", errors="replace", line_buffering=True
        )
        sys.stdout = sys.stderr = self.python
        _state.out, _state.err = (
            _user_stream(fd, saved, stream)
            for fd, saved, stream in zip((1, 2), self.saved_fds, self.saved_streams, strict=True)
        )

    def point(self) -> None:
        for fd, saved in zip((1, 2), self.saved_fds, strict=True):
            if saved is not None:
                os.dup2(self.target, fd)

    def move_to(self, run_log: TextIO | None) -> None:
        self.python.flush()
        if run_log is None:
            self.target = self.early.fileno()
        else:
            self.early.seek(0)
            run_log.write(mask(self.early.read().decode("utf-8", "replace")))
            run_log.flush()
            self.early.seek(0)
            self.early.truncate()
            self.target = run_log.fileno()
        self.point()

    def text(self) -> str:
        """What was caught and has no run.log yet."""
        self.python.flush()
        self.early.seek(0)
        return self.early.read().decode("utf-8", "replace")

    def restore(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.python.flush()
        for fd, saved in zip((1, 2), self.saved_fds, strict=True):
            if saved is not None:
                os.dup2(saved, fd)
                os.close(saved)
        for ours, original in zip((_state.out, _state.err), self.saved_streams, strict=True):
            if ours is not None and ours is not original:
                ours.close()
        sys.stdout, sys.stderr = self.saved_streams
        _state.out = _state.err = _state.console = None
        self.early.close()


class _FdWriter(io.RawIOBase):
    """Writes to where noise goes at the moment."""

    def __init__(self, noise: _Noise) -> None:
        self.noise = noise

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.noise.target

    def write(self, data: Any) -> int:
        return os.write(self.noise.target, data)


def _dup(fd: int) -> int | None:
    """A copy of the descriptor; None where it is closed."""
    try:
        return os.dup(fd)
    except OSError:
        return None


def _user_stream(fd: int, saved: int | None, stream: TextIO) -> TextIO:
    """Where our own lines go while `fd` is turned away: a stream of their own, or the given one where it is not on `fd` (tests)."""
    try:
        if saved is None or stream.fileno() != fd:
            return stream
    except (OSError, ValueError, AttributeError):
        return stream
    return os.fdopen(os.dup(saved), "w", encoding="utf-8", errors="replace", buffering=1)


@contextlib.contextmanager
def capture_noise() -> Iterator[None]:
    """Send what anything but this module prints to run.log. Under -v it stays on the terminal. Not for a launcher: children inherit it.

    Nested calls do nothing. Python warnings and the `logging` module go the same way.
    """
    if _state.noise is not None or _state.verbosity > 0:
        yield
        return
    import faulthandler

    _state.noise = noise = _Noise()
    logging.captureWarnings(True)
    handler = logging.StreamHandler(noise.python)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.enable(file=_err())  # a crash in native code still reaches the user
    try:
        yield
    finally:
        faulthandler.disable()
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
        _state.noise = None
        noise.restore()


# ---- secrets


def is_secret_name(name: str) -> bool:
    """Whether a name of an option or an environment variable says that its value is a secret."""
    return bool(_SECRET_NAME.search(name))


def mask(text: str) -> str:
    """`text` with the values of secret-looking environment variables (HF_TOKEN, WANDB_API_KEY) replaced by ***."""
    for name, value in os.environ.items():
        if (
            len(value) >= 8
            and value in text
            and is_secret_name(name)
            and not value.lower().startswith(("true", "false"))
        ):
            text = text.replace(value, "***")
    return text
