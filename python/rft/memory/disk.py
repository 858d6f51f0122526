"""One file without a name that holds what does not fit into host memory: written and read in pieces by threads.

The file is unlinked as soon as it is open, so whatever ends the process, its space is free again. Python's pread and pwrite let other
threads run meanwhile. Whether the system's cache is gone round (O_DIRECT) is measured once on this folder.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from rft.errors import TrainingError
from rft.pinned import PAGE, whole_pages

THREADS = 4
"""Two writers and two readers keep a disk busy in both directions."""
PIECE = 16 << 20
"""Bytes of one call: large enough for any disk, small enough that a stop is not waited for."""
TRIAL_BYTES = 64 << 20


class DiskFile:
    """Room for pieces of whole pages. All methods may be called from any thread."""

    def __init__(self, folder: Path, *, limit_bytes: int | None = None, trial_bytes: int = TRIAL_BYTES):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.direct, self.measured = choose_mode(folder, trial_bytes)
        self._handle = _open_unnamed(folder, direct=self.direct)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="rft-offload")
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}
        self._limit = limit_bytes
        self.bytes = 0
        """Length of the file."""
        self.written_bytes = 0
        self.read_bytes = 0

    def room(self, size: int) -> int:
        """Offset of a piece for `size` bytes, taken from given-back ones where one fits. Raises TrainingError where the disk is full."""
        size = whole_pages(size)
        with self._lock:
            if free := self._free.get(size):
                return free.pop()
            offset = self.bytes
            self.bytes += size
        if self._limit is not None and self.bytes > self._limit:
            raise _full(self.folder, self.bytes, "over the limit of the file")
        try:
            os.posix_fallocate(self._handle, offset, size)
        except OSError as error:
            raise _full(self.folder, self.bytes, os.strerror(error.errno or 0)) from None
        return offset

    def give_back(self, offset: int, size: int) -> None:
        with self._lock:
            self._free.setdefault(whole_pages(size), []).append(offset)

    def write(self, offset: int, data: Tensor, ready: Any = None) -> Future:
        """Write a flat uint8 tensor of whole pages. ready: CUDA event that is waited for first."""
        return self._pool.submit(self._write, offset, data, ready)

    def read(self, offset: int, data: Tensor, ready: Any = None) -> Future:
        """Read into a flat uint8 tensor of whole pages."""
        return self._pool.submit(self._read, offset, data, ready)

    def _write(self, offset: int, data: Tensor, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        view: Any = memoryview(data.numpy())  # type: ignore[arg-type]
        for start in range(0, len(view), PIECE):
            part = view[start : start + PIECE]
            done = 0
            while done < len(part):
                try:
                    done += os.pwritev(self._handle, [part[done:]], offset + start + done)
                except OSError as error:
                    raise _full(self.folder, self.bytes, os.strerror(error.errno or 0)) from None
        with self._lock:
            self.written_bytes += len(view)

    def _read(self, offset: int, data: Tensor, ready: Any) -> None:
        if ready is not None:
            ready.synchronize()
        view: Any = memoryview(data.numpy())  # type: ignore[arg-type]
        for start in range(0, len(view), PIECE):
            part = view[start : start + PIECE]
            done = 0
            while done < len(part):
                got = os.preadv(self._handle, [part[done:]], offset + start + done)
                if got == 0:
                    raise TrainingError(str(self.folder), "the offload file ends before what was written to it")
                done += got
        with self._lock:
            self.read_bytes += len(view)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._handle)

    def describe(self) -> str:
        how = "direct" if self.direct else "buffered"
        rates = ", ".join(f"{k} {v / 2**30:.2f} GiB/s" for k, v in self.measured.items())
        return f"{how} I/O in {self.folder} ({rates})"


def _full(folder: Path, size: int, why: str) -> TrainingError:
    return TrainingError(
        f"memory.offload_dir = {str(folder)!r}",
        f"the offload file cannot grow to {size / 2**30:.2f} GiB: {why}",
        wanted="a folder on a disk with room",
        do="set memory.offload_dir to another one, memory.offload_host higher, or data.seq_len lower",
    )


def _open_unnamed(folder: Path, *, direct: bool) -> int:
    handle, path = tempfile.mkstemp(prefix="rft-offload-", dir=folder)
    try:
        if not direct:
            return handle
        os.close(handle)
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    finally:
        os.unlink(path)


def choose_mode(folder: Path, size: int) -> tuple[bool, dict[str, float]]:
    """(whether direct I/O is faster here, bytes a second of writing and syncing by mode). A file system without it is buffered."""
    rates = {}
    buffer = mmap.mmap(-1, max(whole_pages(size), PAGE))
    for name, direct in (("buffered", False), ("direct", True)):
        try:
            handle = _open_unnamed(folder, direct=direct)
        except OSError:
            continue
        try:
            start = time.perf_counter()
            for offset in range(0, len(buffer), PIECE):
                os.pwritev(handle, [memoryview(buffer)[offset : offset + PIECE]], offset)
            os.fdatasync(handle)
            rates[name] = len(buffer) / (time.perf_counter() - start)
        except OSError:
            continue
        finally:
            os.close(handle)
    with contextlib.suppress(BufferError):
        buffer.close()
    return rates.get("direct", 0.0) > rates.get("buffered", 0.0), rates
