"""Where and how the kernels of this package run: device checks, block sizes, the number of programs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
import triton
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels on the CPU (tests only): TRITON_INTERPRET=1 was set before the import."""


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which Triton launches on the tensor's GPU: Triton itself takes the current one.

    Raises `NotImplementedError` for a tensor that no kernel can reach.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if INTERPRETED:
        return nullcontext()
    raise NotImplementedError(
        f"rft.kernels run on CUDA devices (or under TRITON_INTERPRET=1), got a {tensor.device} tensor"
    )


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a small number for the interpreter, so that loops over several blocks are tested."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(n: int, *, most: int) -> int:
    """Smallest power of two that is at least n, no more than `most`."""
    return min(triton.next_power_of_2(max(n, 1)), most)


def with_unit_columns(x: Tensor) -> Tensor:
    """`x` with its last dim contiguous, copied only if it is not: kernels take any stride but that one."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """(..., N) as (M, N) with unit column stride; a view where the strides allow one, else a copy."""
    return with_unit_columns(x.reshape(-1, x.shape[-1]))
