"""What layers keep for their backward pass lies in host memory, or in a file, and is fetched a layer ahead.

Forward: each kept tensor is copied to the host on a stream of its own, and its memory on the device is given back when that
copy is done. Backward: while a layer is worked on, the one before it is on its way back. The host never waits for the device; the
computing stream waits for a copy only where it is not done in time. Host memory is a pool of buffers that are used again, pinned on
CUDA. Where there is no device to copy from (CPU), the copies are plain ones, so that everything else is the same.

Only some layers' tensors may leave: those of the others stay where they are, and while they are worked on the next that left is fetched.
disk: buffers beyond `host_bytes` are written to a file by threads, those first that are needed last, and read back ahead.
The last layers' tensors, up to `device_bytes`, stay where they are: backward needs them first.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from rft.memory.host_pool import Buffer, HostPool

SMALLEST = 1 << 20
"""Tensors of fewer bytes stay: a copy of them costs as much as of this many."""
IN_FLIGHT_LAYERS = 2
"""Layers whose copies may be on their way before the computing stream waits for the oldest."""


class _Span(NamedTuple):
    """A dense piece of device memory at one time: what is copied, whatever views of it are saved."""

    address: int
    bytes: int
    dtype: torch.dtype
    version: int


@dataclass(eq=False)
class _Item:
    """One offloaded piece, until the graph that holds it is gone."""

    group: _Group
    dtype: torch.dtype
    bytes: int
    source: Tensor | None
    """On the device, while its copy is on the way (or for good, in the last layers)."""
    buffer: Buffer | None = None
    copied: Any = None
    """Event: the copy to the host is done."""
    fetched: Tensor | None = None
    """Flat, on the device, on its way or there."""
    arrived: Any = None
    """Event: it is there."""
    device: torch.device | None = None
    used: bool = False

    def __del__(self) -> None:
        if self.arrived is not None and not self.used:
            # sent for and never asked for (a step that was given up): its memory may not be handed on before the copy into it is done
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        if self.buffer is not None:
            self.group.pool.free(self.buffer, self.arrived)


@dataclass(eq=False)
class _Group:
    """What one layer keeps."""

    index: int
    pool: HostPool
    items: list[Any] = field(default_factory=list)
    """Weak references: an item lives as long as the graph does."""


@dataclass(frozen=True, eq=False)
class _View:
    """What autograd holds in place of a tensor."""

    item: _Item
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Offloader:
    """For one model. Enter `layer` around each decoder layer's forward."""

    def __init__(
        self, where: Literal["cpu", "disk"], device: torch.device, pool: HostPool, num_layers: int, *, device_bytes: int = 0,
        smallest: int = SMALLEST, leaving: Iterable[int] | None = None,
    ):  # fmt: skip
        """leaving: numbers of the layers whose tensors leave the device; None = of all."""
        if device.type == "cuda" and device.index is None:  # tensors always name theirs
            device = torch.device("cuda", torch.cuda.current_device())
        self.where, self.device, self.pool = where, device, pool
        self._num_layers, self._device_bytes, self._smallest = num_layers, device_bytes, smallest
        self._away = frozenset(range(num_layers) if leaving is None else leaving)
        cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if cuda else None
        self._back = torch.cuda.Stream(device) if cuda else None
        self._groups: list[_Group] = []
        self._here: _Group | None = None
        self._layer: nn.Module | None = None
        self._own: frozenset[int] | None = None
        self._seen: dict[_Span, tuple[_Item, StorageWeakRef]] = {}
        self._leaving: deque[tuple[_Item, Any]] = deque()
        self._layer_bytes = 0
        self._prefetched = -1
        self.moved_bytes = 0
        """Copied to the host so far."""
        self.fetched_late = 0
        """Pieces that backward asked for before they were sent for: 0 in a plain run."""

    @property
    def num_leaving(self) -> int:
        """Layers whose tensors leave the device."""
        return len(self._away)

    def describe(self) -> str:
        """For receipts."""
        room = f"up to {self.pool.limit_bytes / 2**30:.1f} GiB of {'pinned ' if self._out else ''}host memory"
        stays = f", {self._device_bytes / 2**30:.1f} GiB stay on the GPU" if self._device_bytes else ""
        return room + stays + (f", the rest by {self.pool.disk.describe()}" if self.pool.disk else "")

    def close(self) -> None:
        """Give the file back; the run is over."""
        if self.pool.disk is not None:
            self.pool.disk.close()

    # ---- forward

    @contextmanager
    def layer(self, index: int, layer: nn.Module) -> Iterator[None]:
        """Inside, what autograd saves of this decoder layer is offloaded. Layers come in order; the first one begins a new forward."""
        if index == 0 or (self._groups and index <= self._groups[-1].index):
            self._groups = []
        self._prefetched = -1
        self._here = _Group(index, self.pool)
        self._groups.append(self._here)
        self._seen = {}
        self._layer, self._own = layer, None
        before = self.moved_bytes
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._layer_bytes = max(self._layer_bytes, self.moved_bytes - before)
            self._here, self._layer, self._seen = None, None, {}
            if self._out is not None and index == self._num_layers - 1:
                # what left last is needed first, and stays; the loss needs the room of what left before
                self._let_go(torch.cuda.current_stream(self.device), layers=1)

    def pack(self, tensor: Tensor) -> Any:
        """Send a saved tensor on its way; what autograd shall hold instead. Parameters, buffers and small tensors are held as they are."""
        size = tensor.numel() * tensor.element_size()
        if self._here is None or size < self._smallest or tensor.device != self.device or not _is_dense(tensor):
            return tensor
        if tensor.untyped_storage().data_ptr() in self._weights():
            return tensor
        span = _Span(tensor.data_ptr(), size, tensor.dtype, tensor._version)
        item, storage = self._seen.get(span, (None, None))
        if item is None or storage is None or storage.expired():  # freed meanwhile: another tensor lies at its address
            item = self._send(tensor.detach(), size)
            self._seen[span] = item, StorageWeakRef(tensor.untyped_storage())
        return _View(item, tuple(tensor.shape), tensor.stride())

    def _weights(self) -> frozenset[int]:
        """Memory of the layer's parameters and buffers, as they are inside its forward (sharded ones are whole by then)."""
        if self._own is None:
            assert self._layer is not None
            tensors = (*self._layer.parameters(), *self._layer.buffers())
            self._own = frozenset(t.untyped_storage().data_ptr() for t in tensors if not isinstance(t, DTensor))
        return self._own

    def _send(self, tensor: Tensor, size: int) -> _Item:
        assert self._here is not None
        flat = tensor.as_strided((tensor.numel(),), (1,))
        item = _Item(self._here, tensor.dtype, size, flat, device=tensor.device)
        if self._stays(size):
            return item
        self._here.items.append(weakref.ref(item))
        item.buffer = self.pool.take(size, self._here.index)
        self.moved_bytes += size
        if self._out is None:
            item.buffer.view(item.dtype).copy_(flat)
            item.source = None
            self.pool.filled(item.buffer)
            return item
        stream = torch.cuda.current_stream(self.device)
        self._out.wait_stream(stream)
        if item.buffer.read is not None:  # a fetch of what the buffer held before
            self._out.wait_event(item.buffer.read)
        with torch.cuda.stream(self._out):
            item.buffer.view(item.dtype).copy_(flat, non_blocking=True)
            item.copied = self._out.record_event()
        self.pool.filled(item.buffer, item.copied)
        self._leaving.append((item, item.copied))
        self._let_go(stream)
        return item

    def _stays(self, size: int) -> bool:
        """Whether the layer is among the last ones that may stay on the device; the very last always does: it is needed at once."""
        assert self._here is not None
        if self._here.index not in self._away:
            return True
        behind = self._num_layers - 1 - self._here.index
        if behind == 0 and self._out is not None:
            return True
        return behind * max(self._layer_bytes, size) + size <= self._device_bytes

    def _let_go(self, stream: Any, layers: int = IN_FLIGHT_LAYERS) -> None:
        """Give memory back whose copy is done; beyond some layers' worth the computing stream (not the host) waits for the oldest copy."""
        limit = max(1, layers * self._layer_bytes)
        held = sum(item.bytes for item, _ in self._leaving)
        while self._leaving:
            item, copied = self._leaving[0]
            if not copied.query():
                if held <= limit:
                    break
                stream.wait_event(copied)  # the allocator hands memory on in the order of this stream
            item.source = None
            held -= item.bytes
            self._leaving.popleft()

    # ---- backward

    def unpack(self, held: Any) -> Tensor:
        """The tensor again, on the device; the layer before it is sent for."""
        if not isinstance(held, _View):
            return held
        item = held.item
        self._fetch_ahead(item.group)
        if item.source is not None:
            return item.source.as_strided(held.size, held.stride)
        if item.fetched is None:  # of an older forward, whose graph was kept
            self._fetch(item)
        assert item.fetched is not None
        if item.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(item.arrived)
            item.used = True
        return item.fetched.as_strided(held.size, held.stride)

    def _fetch_ahead(self, group: _Group) -> None:
        """Once a layer: send for what is left of it, and for the next one before it of which something is away."""
        place = group.index
        if self._prefetched == place:
            return
        begun, self._prefetched = self._prefetched >= 0, place
        while self._leaving and self._leaving[-1][0].group.index > place:  # worked on already, and held here alone
            _, copied = self._leaving.pop()
            torch.cuda.current_stream(self.device).wait_event(copied)
        before = max((i for i in self._away if i < place), default=-1)
        for other in reversed(self._groups):
            if other.index not in (place, before):
                continue
            for item in (reference() for reference in other.items):
                if item is not None and item.source is None and item.fetched is None:
                    self.fetched_late += begun and other.index == place
                    self._fetch(item)
        self.pool.read_ahead(max((i for i in self._away if i < before), default=-1))

    def _fetch(self, item: _Item) -> None:
        assert item.buffer is not None
        self.pool.load(item.buffer)
        flat = item.buffer.view(item.dtype)
        if self._back is None:
            item.fetched = flat.clone()
            return
        item.fetched = torch.empty_like(flat, device=item.device)
        self._back.wait_stream(torch.cuda.current_stream(self.device))  # its memory may be in use there still
        if item.copied is not None:
            self._back.wait_event(item.copied)
        with torch.cuda.stream(self._back):
            item.fetched.copy_(flat, non_blocking=True)
            item.arrived = self._back.record_event()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a piece of memory without holes or overlaps, in some order of dims."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
