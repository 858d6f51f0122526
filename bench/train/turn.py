"""Processes of a bench take turns on the device: while one measures, the next imports what it needs and waits.

for status, output in turn.in_turn(commands, each=120.0, end=...): ...   the parent
turn.take()                                                            a child, before it first uses the device
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

WAITS = "RFT_BENCH_WAITS"
"""Set for a child whose parent says when its turn is."""


def take() -> None:
    """Wait until the process before this one has ended. At once where nobody gives turns. Ends this process if the parent is gone."""
    if os.environ.pop(WAITS, None) and not sys.stdin.readline():
        sys.exit("the bench has ended")


class _Child:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            command,
            env={**environment, WAITS: "1"},
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()
        except BrokenPipeError:  # it has ended already, and its status tells how
            pass

    def end(self, seconds: float) -> int | None:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        self.output.seek(0)
        with self.output:
            return self.output.read().decode(errors="replace")


OUT_OF_TIME = -1000
"""Status of a process that was stopped, or not begun, because all of the bench's time was over: nothing is known of its system then."""


def in_turn(
    commands: Iterable[Sequence[str]], each: float, end: float, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[int | None, str]]:
    """(exit status, what it printed) of each command in order; the status is None where it took longer than `each` seconds.

    end: of time.monotonic(), when all has to be over. The next process is started when one's turn begins.
    """
    environment = os.environ if environment is None else environment
    rest = iter(commands)
    waiting: list[_Child] = []

    def start() -> None:
        for command in rest:
            waiting.append(_Child(command, environment))
            return

    try:
        start()
        while waiting:
            child = waiting.pop(0)
            left = end - time.monotonic()
            if left < 1:
                child.kill()
                start()
                yield OUT_OF_TIME, child.text()
                continue
            child.go()
            start()
            status = child.end(min(each, left))
            yield OUT_OF_TIME if status is None and left < each else status, child.text()
    finally:
        for child in waiting:
            child.kill()
