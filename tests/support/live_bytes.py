"""Bytes that live tensors hold, seen from below autograd: what an allocator would have to have."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation makes while it is on, until nobody holds it. What a registered operation allocates for itself
    alone is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._held.get(storage._cdata)
                if storage._cdata not in given and (known is None or known[0].expired()):
                    self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes that are alive."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return sum(count for _, count in self._held.values())
