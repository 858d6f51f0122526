"""Blocks of logits that exist one at a time: rows taken and put back, products summed in fp32, running sums over the columns.

Shared by linear_cross_entropy.py and linear_logprob.py. M rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import cross_entropy as rows
from rft.kernels import launch

TILE = 2048
NARROW, WIDE = {"num_warps": 4, "STAGES": 1}, {"num_warps": 8, "STAGES": 3}
"""How `_accumulate_kernel` runs over a block that lies in L2 and over one that does not: of 18 combinations tried the fastest at
1024 x 8192 (8 us) and at 4096 x 128256 (0.62 ms; bench/kernels/tune.py, H200)."""
NARROW_COLUMNS = 16384
ROW_BUCKET = 256
"""The number of labelled rows is rounded up to a multiple of this, so that few shapes occur over a run."""


@triton.jit
def _gather_kernel(x_ptr, x_stride, rows_ptr, out_ptr, H, BLOCK: tl.constexpr):
    """Row i of out = row rows[i] of x, or zeros where rows[i] is -1: a row of x without a label is never read, it may be NaN."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = (cols < H) & (cols * 0 + row >= 0)
    tl.store(out_ptr + i * H + cols, tl.load(x_ptr + row * x_stride + cols, mask=found, other=0.0), mask=cols < H)


@triton.jit
def _factor(upstream_ptr, expected_ptr, HAS_EXPECTED: tl.constexpr):
    """What a gradient made for the expected upstream gradient has to be multiplied by."""
    factor = tl.load(upstream_ptr).to(tl.float32)
    if HAS_EXPECTED:
        factor /= tl.load(expected_ptr).to(tl.float32)
        factor = tl.where(tl.abs(factor - 1.0) < 1e-6, 1.0, factor)  # the two divisions may round differently
    return factor


@triton.jit
def _spread_kernel(
    x_ptr, slots_ptr, upstream_ptr, expected_ptr, out_ptr, H, HAS_EXPECTED: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    factor = _factor(upstream_ptr, expected_ptr, HAS_EXPECTED)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = (cols < H) & (cols * 0 + slot >= 0)
    value = tl.load(x_ptr + slot * H + cols, mask=found, other=0.0).to(tl.float32)
    tl.store(out_ptr + i * H + cols, value * factor, mask=cols < H)


@triton.jit
def _scale_kernel(x_ptr, upstream_ptr, expected_ptr, N, HAS_EXPECTED: tl.constexpr, BLOCK: tl.constexpr):
    factor = _factor(upstream_ptr, expected_ptr, HAS_EXPECTED)
    if factor == 1.0:  # decided on the device: the host does not wait to know it
        return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offsets, mask=offsets < N).to(tl.float32)
    tl.store(x_ptr + offsets, value * factor, mask=offsets < N)


def matching_dtypes(
    op: str, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the shapes; bring hidden, weight and bias to one dtype: autocast's inside autocast, else the weight's."""
    if hidden.shape[:-1] != labels.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit; "
            "wanted (..., H), (V, H) and (...,)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{op}: bias {tuple(bias.shape)} does not fit a weight of {weight.shape[0]} rows")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype).contiguous()


@torch.library.custom_op("rft::scale_", mutates_args=("x",))
def scale_(x: Tensor, upstream: Tensor, expected: Tensor | None) -> None:
    """x *= upstream / expected, in one rounding and only if that is not 1. x: contiguous; the others: (), fp32."""
    if x.numel():
        with launch.on_device_of(x):
            _scale_kernel[(launch.cdiv(x.numel(), 8192),)](
                x, upstream, expected, x.numel(), HAS_EXPECTED=expected is not None, BLOCK=8192, num_warps=8
            )


@scale_.register_fake
def _(x, upstream, expected):
    return None


@torch.library.custom_op("rft::spread_rows", mutates_args=())
def spread_rows(x: Tensor, slots: Tensor, upstream: Tensor, expected: Tensor | None) -> Tensor:
    """Row i is upstream / expected times row slots[i] of x, or zeros where slots[i] is -1."""
    out = x.new_empty(slots.shape[0], x.shape[1])
    block = launch.power_of_two(x.shape[1], most=4096)
    if out.numel():
        with launch.on_device_of(x):
            _spread_kernel[(out.shape[0], launch.cdiv(x.shape[1], block))](
                x, slots, upstream, expected, out, x.shape[1], HAS_EXPECTED=expected is not None, BLOCK=block
            )
    return out


@spread_rows.register_fake
def _(x, slots, upstream, expected):
    return x.new_empty(slots.shape[0], x.shape[1])


def take_rows(x: Tensor, index: Tensor | None, start: int, stop: int) -> Tensor:
    if index is None:
        return x[start:stop]
    out = x.new_empty(stop - start, x.shape[1])
    block = launch.power_of_two(x.shape[1], most=4096)
    with launch.on_device_of(x):
        grid = (stop - start, launch.cdiv(x.shape[1], block))
        _gather_kernel[grid](x, x.stride(0), index[start:stop], out, x.shape[1], BLOCK=block)
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total (fp32) = a @ b, or += a @ b, accumulated in fp32 whatever the dtype of a and b."""
    if a.dtype == total.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def labelled_rows(M: int, num_labels: int | None) -> int:
    """How many of M rows to keep when `num_labels` of them have labels."""
    return M if num_labels is None else min(M, launch.cdiv(num_labels, ROW_BUCKET) * ROW_BUCKET)


def compact_labels(labels: Tensor, ignore_index: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the labelled rows are, found on the device without the host waiting for it.

    labels: (M,). Returns (index (size,) of the labelled rows in order, -1 past the last; slots (M,) the inverse, -1 for a row
    without label; overflow () bool: more rows have labels than `size`).
    """
    labelled = labels != ignore_index
    position = labelled.cumsum(0)
    slots = torch.where(labelled & (position <= size), position - 1, -1)
    index = labels.new_full((size + 1,), -1)
    index.scatter_(0, torch.where(slots < 0, size, slots), torch.arange(labels.shape[0], device=labels.device))
    return index[:size], slots, position[-1] > size


class RowState:
    """What a chunk of rows carries from one block of columns to the next."""

    def __init__(self, like: Tensor, num_rows: int, want_entropy: bool = False) -> None:
        self.reference, self.total, self.target = like.new_empty(3, num_rows, dtype=torch.float32)
        self.z_total = torch.empty_like(self.total) if want_entropy else None

    def add_block(
        self, block: Tensor, labels: Tensor, bias: Tensor | None, accumulator: Tensor | None, *, first_column: int,
        scale: float, softcap: float, ignore_index: int,
    ) -> None:  # fmt: skip
        """Add one block of raw logits (n, columns); with an accumulator (n, H), leave the terms to be multiplied in `block`."""
        n, columns = block.shape
        H = 0 if accumulator is None else accumulator.shape[1]
        with launch.on_device_of(block):
            rows._accumulate_kernel[(n,)](
                block, block.stride(0), labels, bias, self.reference, self.total, self.target, self.z_total,
                accumulator, H, first_column, columns, H, scale, softcap, ignore_index,
                HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, FIRST=first_column == 0,
                WANT_GRADIENT=accumulator is not None, WANT_ENTROPY=self.z_total is not None,
                BLOCK=launch.power_of_two(columns, most=TILE),
                BLOCK_H=launch.power_of_two(H, most=1024), **(NARROW if columns <= NARROW_COLUMNS else WIDE),
            )  # fmt: skip
