"""Where and how the kernels of this package run: device checks, block sizes, the number of programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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


class Op:
    """A registered op whose function is called straight where nobody looks: no gradient is recorded, nothing traces, no mode or subclass.

    The dispatcher's way round takes tens of us of host time, and a step of 8B has some 300 such calls; an FP8 step on short documents is
    not much longer on the device than on the host. Everything that has to see the op (compile, fake tensors, recompute policies) does.
    """

    def __init__(self, name: str, function: Callable[..., Any], changes: tuple[str, ...] = ()):
        self.function = function
        self.op = torch.library.custom_op(name, mutates_args=changes)(function)
        self.register_fake = self.op.register_fake
        self.register_autograd = self.op.register_autograd

    def __call__(self, first: Any, *rest: Any) -> Any:
        plain = first[0] if isinstance(first, list) else first
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or is_in_torch_dispatch_mode()
            or type(plain) not in (Tensor, nn.Parameter)
            or torch._C._are_functorch_transforms_active()
        ):
            return self.op(first, *rest)
        return self.function(first, *rest)


def op(name: str, *, changes: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: `Op` of this name, its schema from the annotations. changes: arguments that it writes to."""
    return lambda function: Op(name, function, changes)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a small number for the interpreter, so that loops over several blocks are tested."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have on this GPU, as Triton itself asks for them before a launch."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes 3 to 5 us on the host, and a step asks hundreds of times."""
    return -(-a // b)


def power_of_two(n: int, *, most: int) -> int:
    """Smallest power of two that is at least n, no more than `most`."""
    return min(1 << (max(n, 1) - 1).bit_length(), most)


def with_unit_columns(x: Tensor) -> Tensor:
    """`x` with its last dim contiguous, copied only if it is not: kernels take any stride but that one."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_rows(x: Tensor) -> Tensor:
    """(..., N) as (M, N) with unit column stride; a view where the strides allow one, else a copy."""
    return with_unit_columns(x.reshape(-1, x.shape[-1]))
