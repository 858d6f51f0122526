"""Host memory of an exact size that a GPU copies from and to by itself.

Not torch's pinned allocator: it rounds sizes up to powers of two, which of tens of GiB is too much.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from rft.errors import TrainingError

PAGE = 4096
"""Buffers are whole pages, so that files can be read into them directly."""


def whole_pages(size: int) -> int:
    """The size rounded up to pages."""
    return -(-size // PAGE) * PAGE


class HostMemory:
    """`bytes` of page-aligned host memory as a flat uint8 tensor; pinned for CUDA where asked. Given back when the object goes."""

    def __init__(self, size: int, *, pinned: bool):
        self.size = whole_pages(size)
        self._pinned = False
        try:
            self._map = mmap.mmap(-1, max(self.size, PAGE))
        except (OSError, ValueError, OverflowError) as error:
            raise TrainingError(
                "memory of this machine",
                f"{size / 2**30:.2f} GiB more of host memory for offloading are not to be had: {error}",
                do="set memory.offload_host lower, or memory.offload (offload_states) to another place",
            ) from None
        self.data: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        if pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), self.data.numel(), 0))  # type: ignore[attr-defined]
            if code:
                raise TrainingError(
                    "memory of this machine",
                    f"CUDA cannot pin {size / 2**30:.2f} GiB more of host memory (error {code})",
                    wanted="room under the locked-memory limit (ulimit -l) and free host memory",
                    do="set memory.offload_host lower",
                )
            self._pinned = True

    def tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """The first `count` numbers of it."""
        size = torch.empty((), dtype=dtype).element_size()
        return self.data[: count * size].view(dtype)

    def __del__(self) -> None:
        if self._pinned and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())  # type: ignore[attr-defined]
