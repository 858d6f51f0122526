"""Dropout whose mask is never stored: y = x * keep / (1 - p), keep drawn from (seed, row, column) whenever it is needed.

M rows, N columns. Philox with the row and the column as its counter, so that the mask does not depend on strides, blocks or the number of
programs, and 2^31 elements are no border. The seed lies on the device: a captured graph draws anew if the seed is. Steps of other
ops' passes: they have no gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

BLOCK = 512
"""Columns of a quarter of a program's block: one call of Philox draws four numbers."""
NUM_WARPS = 4


@triton.jit
def _kernel(
    x_ptr, x_stride, total_ptr, total_stride, seeds_ptr, index, p, scale, N, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row's block of four quarters. ADD: total += dropped x; else total = dropped x."""
    blocks = tl.cdiv(N, 4 * BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    first = (program % blocks) * 4 * BLOCK
    cols = tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + index)
    zero = tl.zeros((BLOCK,), tl.int32)
    drawn = tl.philox(seed, (first + cols).to(tl.int32), zero + row.to(tl.int32), zero, zero)
    for quarter in tl.static_range(4):
        at = first + quarter * BLOCK + cols
        mask = at < N
        keep = tl.uint_to_uniform_float(drawn[quarter]) >= p
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        y = tl.where(keep, x * scale, 0.0)
        if ADD:
            y += tl.load(total_ptr + row * total_stride + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(total_ptr + row * total_stride + at, y, mask=mask)


def _launch(x: Tensor, total: Tensor, seeds: Tensor, index: int, p: float, *, add: bool) -> None:
    M, N = x.shape
    if M and N:
        with launch.on_device_of(x):
            _kernel[(M * launch.cdiv(N, 4 * BLOCK),)](
                x, x.stride(0), total, total.stride(0), seeds, index, p, 1 / (1 - p), N, ADD=add, BLOCK=BLOCK, num_warps=NUM_WARPS
            )  # fmt: skip


@torch.library.custom_op("rft::dropped", mutates_args=())
def _dropped(x: Tensor, seeds: Tensor, index: int, p: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, y, seeds, index, p, add=False)
    return y


@_dropped.register_fake
def _(x, seeds, index, p):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("rft::add_dropped", mutates_args=("total",))
def _add_dropped(total: Tensor, x: Tensor, seeds: Tensor, index: int, p: float) -> None:
    _launch(x, total, seeds, index, p, add=True)


@_add_dropped.register_fake
def _(total, x, seeds, index, p):
    return None


def draw_seeds(number: int, device: torch.device) -> Tensor:
    """int64 (number,) from the device's default generator, whose state checkpointing keeps: a layer that is computed again drops the same."""
    return torch.randint(0, 2**62, (number,), device=device)


def dropped(x: Tensor, seeds: Tensor, index: int, p: float) -> Tensor:
    """x with each element zero with probability p, else times 1 / (1 - p). x: (M, N); the mask is that of seeds[index]."""
    return _dropped(launch.with_unit_columns(x), seeds, index, p)


def add_dropped(total: Tensor, x: Tensor, seeds: Tensor, index: int, p: float) -> Tensor:
    """total += dropped(x), where it lies. total: (M, N) with unit column stride."""
    _add_dropped(total, launch.with_unit_columns(x), seeds, index, p)
    return total
