"""Buffers in host memory that are used again, and, where there is a disk file, more of them than the memory holds.

Buffers are filled in the order of the forward pass and wanted in reverse. So the oldest go to disk first, written ahead of need while
the memory is three quarters full, and the newest of them come back first, as memory is given back.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft.errors import TrainingError
from rft.memory.disk import DiskFile
from rft.pinned import HostMemory, whole_pages

WRITE_AHEAD = 0.75
"""Share of the host's part from which buffers are written to disk, though there is room still."""


@dataclass(eq=False)
class Buffer:
    """One piece that lies here. Only the pool changes it."""

    bytes: int
    group: int
    memory: HostMemory | None
    read: Any = None
    """Event of the last fetch to the device of whatever its memory held: it may be overwritten after that."""
    filled: bool = False
    ready: Any = None
    """Event: its data are there."""
    offset: int | None = None
    """In the file."""
    writing: Future | None = None
    reading: Future | None = None
    freed: bool = False

    def view(self, dtype: torch.dtype) -> Tensor:
        assert self.memory is not None, "load() comes first"
        return self.memory.tensor(self.bytes // torch.empty((), dtype=dtype).element_size(), dtype)


class HostPool:
    """At most `limit_bytes` of host memory. Beyond it: the disk file, or an error where there is none."""

    def __init__(self, limit_bytes: int, *, pinned: bool, disk: DiskFile | None = None):
        self.limit_bytes, self.disk = limit_bytes, disk
        self._pinned = pinned
        self._lock = threading.RLock()
        self._idle: dict[int, list[tuple[HostMemory, Any]]] = {}
        self._order: deque[Buffer] = deque()
        """Filled buffers, the oldest first; freed ones are passed over."""
        self._freed: deque[tuple[Buffer, Any]] = deque()
        self._away: list[Buffer] = []
        """Buffers whose data are on disk alone, in the order of the forward pass."""
        self.bytes = 0
        """Host memory that is held."""
        self.peak_bytes = 0

    def take(self, size: int, group: int) -> Buffer:
        """A buffer to be filled. Raises TrainingError where neither memory nor disk has room."""
        with self._lock:
            self._settle_freed()
            memory, read = self._memory(size, evict=True)
            return Buffer(size, group, memory, read)

    def filled(self, buffer: Buffer, ready: Any = None) -> None:
        """Its data are there, or will be after the event."""
        with self._lock:
            self._settle_freed()
            buffer.filled, buffer.ready = True, ready
            self._order.append(buffer)
            self._write_ahead()

    def load(self, buffer: Buffer) -> None:
        """See to it that its data are in host memory; waits for the disk where it was not read ahead."""
        with self._lock:
            self._settle_freed()
            if buffer.memory is None:
                self._begin_read(buffer)
        if buffer.reading is not None:
            buffer.reading.result()

    def read_ahead(self, group: int) -> None:
        """Backward is about to want this layer and then those before it: read what is on disk while there is room."""
        with self._lock:
            self._settle_freed()
            while self._away and self._away[-1].group <= group and self._room_for(self._away[-1].bytes):
                self._begin_read(self._away[-1])

    def free(self, buffer: Buffer, read: Any = None) -> None:
        """Nobody wants it any more. read: event after which its memory may be overwritten. Takes no lock: a collected graph may call
        it on any thread at any time."""
        buffer.freed = True
        self._freed.append((buffer, read))

    def _settle_freed(self) -> None:
        """Make the memory and the room on disk of freed buffers idle; those that are being moved wait for the next call."""
        for _ in range(len(self._freed)):
            buffer, read = self._freed.popleft()
            for moving in (buffer.writing, buffer.reading):
                if moving is not None and not moving.done() and not moving.cancel():
                    self._freed.append((buffer, read))
                    break
            else:
                if buffer.memory is not None:
                    self._idle.setdefault(buffer.memory.size, []).append(
                        (buffer.memory, read or buffer.ready or buffer.read)
                    )
                    buffer.memory = None
                if buffer.offset is not None:
                    assert self.disk is not None
                    self.disk.give_back(buffer.offset, buffer.bytes)
                    buffer.offset = None
        while self._order and self._order[0].freed:
            self._order.popleft()
        while self._away and self._away[-1].freed:
            self._away.pop()

    # ---- memory

    def _room_for(self, size: int) -> bool:
        return bool(self._idle.get(whole_pages(size))) or self.bytes + whole_pages(size) <= self.limit_bytes

    def _memory(self, size: int, *, evict: bool) -> tuple[HostMemory, Any]:
        size = whole_pages(size)
        if idle := self._idle.get(size):
            return idle.pop()
        while self.bytes + size > self.limit_bytes:
            if not self._drop_idle(size) and not (evict and self._evict()):
                break
            if idle := self._idle.get(size):
                return idle.pop()
        if self.bytes + size > self.limit_bytes and self.disk is None:
            raise TrainingError(
                "memory of this machine",
                f"what the layers keep needs more than {self.limit_bytes / 2**30:.2f} GiB of host memory",
                wanted="more of it, or a disk",
                do='set memory.offload = "disk", memory.offload_host higher where there is more memory, or data.seq_len lower',
            )
        # with a disk file: over the limit by what one layer is fetched into, where everything else is in use
        made = HostMemory(size, pinned=self._pinned)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return made, None

    def _drop_idle(self, wanted: int) -> bool:
        """Give one idle piece of another size back to the system."""
        for size, idle in self._idle.items():
            if size != wanted and idle:
                memory, read = idle.pop()
                if read is not None:
                    read.synchronize()
                self.bytes -= memory.size
                return True
        return False

    # ---- disk

    def _write_ahead(self) -> None:
        if self.disk is None or self.bytes < WRITE_AHEAD * self.limit_bytes:
            return
        for buffer in self._order:
            if not buffer.freed and buffer.offset is None:
                self._begin_write(buffer)
                return  # one for each that is filled: writing keeps up with filling

    def _begin_write(self, buffer: Buffer) -> None:
        assert self.disk is not None
        assert buffer.memory is not None
        buffer.offset = self.disk.room(buffer.bytes)
        buffer.writing = self.disk.write(buffer.offset, buffer.memory.data, buffer.ready)

    def _evict(self) -> bool:
        """Make the oldest filled buffer's memory idle, its data being on disk. Waits for the disk where it is behind."""
        if self.disk is None:
            return False
        while self._order and self._order[0].freed:
            self._order.popleft()
        if not self._order:
            return False
        buffer = self._order.popleft()
        if buffer.offset is None:
            self._begin_write(buffer)
        assert buffer.writing is not None
        assert buffer.memory is not None
        buffer.writing.result()
        self._idle.setdefault(buffer.memory.size, []).append((buffer.memory, buffer.read))
        buffer.memory = None
        self._away.append(buffer)
        return True

    def _begin_read(self, buffer: Buffer) -> None:
        assert self.disk is not None
        assert buffer.offset is not None
        if buffer in self._away:
            self._away.remove(buffer)
        buffer.memory, read = self._memory(buffer.bytes, evict=False)
        buffer.reading = self.disk.read(buffer.offset, buffer.memory.data, read)
