"""What has to be in order before anything heavy is imported: the process's folder, home, encoding, streams and launcher.

Each of these makes libraries fail later, in their own words or without any: MKL ends the process where the current
directory is gone, the hub's cache goes to /.cache where HOME is empty.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from rft import log
from rft.errors import ConfigError
from rft.ranks import read_ranks

UNWIND_SECONDS = 3.0


class Terminated(KeyboardInterrupt):
    """SIGTERM before anything listens that would save a state: unwinds like Ctrl-C, so that nothing is left half done."""


def prepare_process() -> None:
    """For the `rft` command alone, first of all: it may start this process again, and SIGTERM unwinds it from here on."""
    if sys.getfilesystemencoding().lower().replace("-", "") != "utf8":
        _start_again_in_utf8()
    log.open_closed_streams()
    if os.environ.get("HOME") == "":
        del os.environ["HOME"]  # as if not set: "~" is the user's home again, not "/"
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _unwind_on_sigterm()


def _start_again_in_utf8() -> None:
    """Under a POSIX locale Python may read names as ASCII, and every name beyond it fails somewhere when it is written down."""
    if os.environ.get("PYTHONUTF8") == "1" or not sys.executable:
        return  # it did not help
    os.environ["PYTHONUTF8"] = "1"  # the workers' too
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _unwind_on_sigterm() -> None:
    """SIGTERM raises Terminated; where the main thread does not come to it (a long call into native code), the process ends."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # training puts its own in place while it listens
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_end_in_time, args=(read_end,), name="rft-sigterm", daemon=True).start()


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _end_in_time(read_end: int) -> None:
    while data := os.read(read_end, 64):
        if signal.SIGTERM in data:
            time.sleep(UNWIND_SECONDS)
            os._exit(128 + signal.SIGTERM)


def check_process(*, ranks: bool) -> None:
    """Raises ConfigError for a current directory that is gone. ranks: and for a launcher's variables that cannot be."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current directory", "does not exist any more: it was removed or renamed", do="cd to one that exists"
        ) from None
    except OSError as error:
        raise ConfigError(
            "the current directory", f"cannot be read: {error.strerror}", do="cd to another one"
        ) from None
    if ranks:
        read_ranks()
