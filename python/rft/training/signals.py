"""SIGTERM and SIGINT: finish the step, save, leave. A second one, or a save that takes too long, ends the process at once.

The signal's byte goes through a pipe to a thread (signal.set_wakeup_fd), so that a second signal and the deadline count
even while the main thread waits inside a collective or for a GPU. Under rft's own launcher a worker ignores SIGINT and
SIGTERM, which a terminal or a batch system may send to the whole process group, and obeys what the launcher forwards.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.errors import Stopped

if TYPE_CHECKING:
    import torch.distributed as dist

# What the launcher sends to its workers for a SIGTERM or SIGINT of its own.
FORWARDED = {signal.SIGTERM: signal.SIGUSR1, signal.SIGINT: signal.SIGUSR2}
_MEANS = {forward: original for original, forward in FORWARDED.items()}
# `timeout`, torchrun and terminals send one request twice: to the process and to its group. A person is slower than this.
REPEAT_SECONDS = 0.5
LONG_STEP_SECONDS = 5.0


class Signals:
    """Whether this run was asked to stop, as all ranks agree."""

    def __init__(self, timeout_seconds: float = 30.0):
        self.timeout_seconds = timeout_seconds
        self.received: signal.Signals | None = None
        """The first signal that this process got."""
        self.agreed: signal.Signals | None = None
        """The signal that all ranks stop for."""
        self.long_steps = False
        """All ranks agree that steps take so long that a stop must be looked for between micro-batches too."""
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._last_check = 0.0

    def install(self) -> Signals:
        """Start to listen. Signals that are ignored stay so (nohup, a worker under the launcher). Only in the main thread; else nothing."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is not None:
            return self
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        self._pipe = read_end, write_end
        self._old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, *_MEANS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, lambda *_: None)  # the thread does the work
        self._thread = threading.Thread(target=self._listen, args=(read_end,), name="rft-signals", daemon=True)
        self._thread.start()
        self._last_check = time.monotonic()
        dist = sys.modules.get("torch.distributed")
        self.long_steps = dist is None or not dist.is_initialized()  # alone, looking costs nothing
        return self

    def restore(self) -> None:
        """Stop to listen; signals do what they did before."""
        if self._pipe is None:
            return
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        read_end, write_end = self._pipe
        os.close(write_end)  # ends the thread
        if self._thread is not None:
            self._thread.join()
        os.close(read_end)
        self._pipe, self._thread, self._old = None, None, {}

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask for a stop as the signal would."""
        self.received = signal.Signals(number)

    def stop_requested(self, group: dist.ProcessGroup | None) -> int | None:
        """The signal that any rank got, the same answer on all of them; None = go on. Every rank calls it, at the same places.

        One CPU all-reduce of two numbers; no device is waited for.
        """
        from rft.parallel.collectives import maxima_over_ranks

        now = time.monotonic()
        since, self._last_check = now - self._last_check, now
        number, slowest = maxima_over_ranks([float(self.received or 0), since], group)
        # Once steps were long they stay so: between micro-batches the checks come more often.
        self.long_steps = self.long_steps or slowest > LONG_STEP_SECONDS
        if number:
            self.agreed = signal.Signals(int(number))
        return int(self.agreed) if self.agreed else None

    def stopped(self, saved: Path | None) -> Stopped:
        """What to raise once the state is saved (exit code 130 or 143), or where it could not be (1)."""
        number = self.agreed or self.received or signal.SIGTERM
        if saved is None:
            return Stopped("stop", f"{number.name} arrived, and the state could not be saved", exit_code=1)
        return Stopped(
            "",
            f"by {number.name}: saved {saved.name}",
            do="start the same command again: it goes on from there",
            exit_code=128 + number,
        )

    def _listen(self, read_end: int) -> None:
        first: float | None = None
        while True:
            wait = None if first is None else max(0.0, first + self.timeout_seconds - time.monotonic())
            ready, _, _ = select.select([read_end], [], [], wait)
            if not ready:
                _leave(
                    f"the state could not be saved within {self.timeout_seconds:g} s of the signal (checkpoint.signal_timeout_seconds)"
                )
            data = os.read(read_end, 64)
            if not data:
                return
            for byte in data:
                number = signal.Signals(byte) if byte in signal.valid_signals() else None
                number = _MEANS.get(number, number)  # type: ignore[arg-type]
                if number not in FORWARDED:
                    continue
                now = time.monotonic()
                if first is None:
                    first, self.received = now, number
                elif now - first > REPEAT_SECONDS:
                    _leave(
                        f"a second signal ({number.name}) arrived: stopped at once; the last complete checkpoint is as it was"
                    )


def _leave(why: str) -> None:
    """End the process from the listening thread, whatever the main thread is in."""
    from rft import log

    with contextlib.suppress(Exception):
        log.warn(why, do="start the same command again: it goes on from the last complete checkpoint")
        sys.stderr.flush()
    os._exit(1)
