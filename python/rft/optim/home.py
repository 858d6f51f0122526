"""Where optimizer states and masters lie between steps when not on the GPU: pinned host memory, or a file mapped into it.

They visit the device a bucket at a time: while one bucket is worked on, the next is on its way there and the last on its way
back, each on a stream of its own, and the host waits for none of it. On a CPU the visits are copies, so that everything around
them is tried there. A file is unlinked as soon as it is open: whatever ends the process, its space is free again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft.errors import ConfigError
from rft.pinned import HostMemory

BUCKET_BYTES = 256 << 20
"""Bytes that visit at one time: 5 ms over PCIe 5. Three buckets are on the device at most."""


@dataclass(frozen=True)
class Moved:
    """Tensors of one parameter that lie at home, by key, and the device that they visit."""

    name: str
    tensors: dict[str, Tensor]
    device: torch.device

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class Home:
    """Keeps tensors in host memory ("cpu") or in unlinked files of `folder` ("disk")."""

    def __init__(self, where: Literal["cpu", "disk"], device: torch.device, folder: Path | None = None):
        if where == "disk":
            assert folder is not None, "resolve() decides memory.offload_dir"
            folder.mkdir(parents=True, exist_ok=True)
        self.where, self._device, self._folder = where, device, folder
        self._there = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._back = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sent: dict[str, torch.cuda.Event] = {}
        self._leaving: tuple[Any, torch.cuda.Event] | None = None
        self._memory: list[HostMemory] = []
        self.bytes = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of it that lies here."""
        size = tensor.numel() * tensor.element_size()
        self.bytes += size
        if self.where == "disk" and size:
            made = self._in_file(tensor.numel(), tensor.dtype).view(tensor.shape)
        else:
            memory = HostMemory(size, pinned=self._there is not None)
            self._memory.append(memory)
            made = memory.tensor(tensor.numel(), tensor.dtype).view(tensor.shape)
        return made.copy_(tensor.detach())

    def _in_file(self, numbers: int, dtype: torch.dtype) -> Tensor:
        handle, path = tempfile.mkstemp(prefix="rft-states-", dir=self._folder)
        try:
            size = numbers * torch.empty((), dtype=dtype).element_size()
            try:
                os.posix_fallocate(handle, 0, size)  # a full disk is an error now and not a bus error in a step
            except OSError as error:
                raise ConfigError(
                    f"memory.offload_dir = {str(self._folder)!r}",
                    f"{size / 2**30:.2f} GiB more of optimizer states do not fit there: {os.strerror(error.errno or 0)}",
                    wanted="a folder on a disk with room",
                    do='set memory.offload_dir to another one, or memory.offload_states = "cpu"',
                ) from None
            return torch.from_file(path, shared=True, size=numbers, dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(path)

    def visits(self, all_moved: list[Moved]) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Buckets of {parameter: {key: tensor on the device}}; what the caller makes of the tensors is written home after each."""
        buckets = _buckets(all_moved)
        coming = self._fetch(buckets[0]) if buckets else None
        for index, bucket in enumerate(buckets):
            assert coming is not None
            here, arrived = coming
            coming = self._fetch(buckets[index + 1]) if index + 1 < len(buckets) else None
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
            yield here
            self._send(bucket, here)

    def _fetch(self, bucket: list[Moved]) -> tuple[dict[str, dict[str, Tensor]], torch.cuda.Event | None]:
        if self._there is None:
            return {m.name: {k: t.clone() for k, t in m.tensors.items()} for m in bucket}, None
        # allocated on the computing stream, where its memory may still be in use
        here = {m.name: {k: torch.empty_like(t, device=m.device) for k, t in m.tensors.items()} for m in bucket}
        self._there.wait_stream(torch.cuda.current_stream(self._device))
        for m in bucket:
            if m.name in self._sent:  # it may not overtake its own way back of the step before
                self._there.wait_event(self._sent[m.name])
        with torch.cuda.stream(self._there):
            for m in bucket:
                for key, tensor in m.tensors.items():
                    here[m.name][key].copy_(tensor, non_blocking=True)
            return here, self._there.record_event()

    def _send(self, bucket: list[Moved], here: dict[str, dict[str, Tensor]]) -> None:
        if self._back is None:
            for m in bucket:
                for key, tensor in m.tensors.items():
                    tensor.copy_(here[m.name][key])
            return
        stream = torch.cuda.current_stream(self._device)
        self._back.wait_stream(stream)
        with torch.cuda.stream(self._back):
            for m in bucket:
                for key, tensor in m.tensors.items():
                    tensor.copy_(here[m.name][key], non_blocking=True)
            event = self._back.record_event()
        for m in bucket:
            self._sent[m.name] = event
        # The bucket before this one may be given back to the allocator once the computing stream is behind its copy.
        if self._leaving is not None:
            stream.wait_event(self._leaving[1])
        self._leaving = (here, event)

    def settle(self) -> None:
        """Wait until everything is here."""
        if self._back is not None:
            self._back.synchronize()
            self._leaving = None


def _buckets(moved: list[Moved]) -> list[list[Moved]]:
    """In order, at most BUCKET_BYTES each; a larger one alone."""
    buckets: list[list[Moved]] = []
    room = 0
    for item in moved:
        if not buckets or item.bytes > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(item)
        room -= item.bytes
    return buckets
