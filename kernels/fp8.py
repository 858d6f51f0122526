"""FP8 (e4m3) products of a frozen weight: rows of the input and of the output gradient quantised, each by its own scale.

T tokens, K inputs, N outputs. x ~ q * scale with one fp32 scale a row, the row's largest value over 448. A weight is quantised once
(its scales are searched for the smallest error, `closest_rows`), in both layouts, since the product needs its second operand with the
summed dim contiguous: by row of (N, K) for x @ W.T, by row of (K, N) for dy @ W. Together they take the bytes of bf16. Sums in fp32, with the tensor cores' fast accumulation: a tenth
faster, and the error of dy @ W against bf16 weights is 3.77 % for 3.75 % at N = 28,672, less at fewer (docs/design-notes.md). A step of other
ops' passes: nothing here has a gradient.
Off CUDA the same numbers are multiplied in fp32 (tests).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 4096


class Rows(NamedTuple):
    """q (M, N) e4m3 and scale (M, 1) fp32 with q * scale ~ x."""

    q: Tensor
    scale: Tensor


class Weight(NamedTuple):
    """A frozen (N, K) weight in both layouts. Scales are fp32, (N, 1) and (K, 1)."""

    by_row: Tensor
    row_scale: Tensor
    by_column: Tensor
    """(K, N)."""
    column_scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.by_row.shape

    def dequantised(self) -> Tensor:
        """(N, K) fp32, as the forward product sees it."""
        return self.by_row.float() * self.row_scale


def quantise_rows_reference(x: Tensor) -> Rows:
    """In plain torch."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return Rows((x / scale).clamp(-LARGEST, LARGEST).to(DTYPE), scale)


@triton.jit
def scale_of(largest):
    """Scale of a row (or of rows) from its largest absolute value, fp32."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def quotient(x, scale):
    """What is stored of x, fp32, before it is rounded to e4m3."""
    return tl.minimum(tl.maximum(x / scale, -448.0), 448.0)


def empty_rows(M: int, N: int, device: torch.device) -> Rows:
    """Where a kernel puts quantised rows; `landed` gives them out. The interpreter has no e4m3 stores to trust: fp32 there."""
    q = torch.empty(M, N, dtype=torch.float32 if launch.INTERPRETED else DTYPE, device=device)
    return Rows(q, torch.empty(M, 1, dtype=torch.float32, device=device))


def landed(rows: Rows) -> Rows:
    """Rows that a kernel has filled, in e4m3."""
    return Rows(rows.q.to(DTYPE), rows.scale)


@triton.jit
def _quantise_kernel(x_ptr, x_stride, q_ptr, scale_ptr, N, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its largest value, then its quotients. A row of one block is read once."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    q_ptr += row * N
    cols = tl.arange(0, BLOCK)
    if ONE_BLOCK:
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(x), axis=0))
        tl.store(q_ptr + cols, quotient(x, scale).to(q_ptr.dtype.element_ty), mask=cols < N)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            x = tl.load(x_ptr + start + cols, mask=start + cols < N, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = scale_of(tl.max(largest, axis=0))
        for start in range(0, N, BLOCK):  # again from L2
            x = tl.load(x_ptr + start + cols, mask=start + cols < N, other=0.0).to(tl.float32)
            tl.store(q_ptr + start + cols, quotient(x, scale).to(q_ptr.dtype.element_ty), mask=start + cols < N)
    tl.store(scale_ptr + row, scale)


@launch.op("rft::fp8_quantise_rows")
def _quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    q, scale = empty_rows(M, N, x.device)
    if M and N:
        block = launch.power_of_two(N, most=1 << 14)
        with launch.on_device_of(x):
            _quantise_kernel[(M,)](
                x, x.stride(0), q, scale, N, ONE_BLOCK=block >= N, BLOCK=block if block >= N else BLOCK,
                num_warps=max(1, min(16, block // 512)),
            )  # fmt: skip
    return landed(Rows(q, scale))


@_quantise_rows.register_fake
def _(x):
    return fake_rows(x)


def fake_rows(x: Tensor) -> Rows:
    """Empty rows of the shape of x: what fake kernels answer."""
    return Rows(torch.empty(x.shape, dtype=DTYPE, device=x.device), x.new_empty(x.shape[0], 1, dtype=torch.float32))


def quantise_rows(x: Tensor) -> Rows:
    """Rows of x: (M, N), any float dtype and row stride."""
    if not x.is_cuda:  # the same numbers, much faster than in the interpreter
        return quantise_rows_reference(x)
    return Rows(*_quantise_rows(launch.with_unit_columns(x)))


JOINED = 3
"""Most tensors that `quantise_joined` takes."""


@triton.jit
def _largest_of(x_ptr, N, largest, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + start + cols, mask=start + cols < N, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    return largest


@triton.jit
def _put(x_ptr, N, q_ptr, scale, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for start in range(0, N, BLOCK):  # again from L2
        x = tl.load(x_ptr + start + cols, mask=start + cols < N, other=0.0).to(tl.float32)
        tl.store(q_ptr + start + cols, quotient(x, scale).to(q_ptr.dtype.element_ty), mask=start + cols < N)


@triton.jit
def _quantise_joined_kernel(
    x_ptr, x_stride, N_x, y_ptr, y_stride, N_y, z_ptr, z_stride, N_z, q_ptr, scale_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of [x | y | z]. An N of 0: it is not there."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    z_ptr += row * z_stride
    q_ptr += row * (N_x + N_y + N_z)
    largest = _largest_of(x_ptr, N_x, tl.zeros((BLOCK,), tl.float32), BLOCK)
    largest = _largest_of(y_ptr, N_y, largest, BLOCK)
    largest = _largest_of(z_ptr, N_z, largest, BLOCK)
    scale = scale_of(tl.max(largest, axis=0))
    tl.store(scale_ptr + row, scale)
    _put(x_ptr, N_x, q_ptr, scale, BLOCK)
    _put(y_ptr, N_y, q_ptr + N_x, scale, BLOCK)
    _put(z_ptr, N_z, q_ptr + N_x + N_y, scale, BLOCK)


@launch.op("rft::fp8_quantise_joined")
def _quantise_joined(x: Tensor, y: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    parts = [x, y, x[:, :0] if z is None else z]
    rows = empty_rows(x.shape[0], sum(p.shape[1] for p in parts), x.device)
    if rows.q.numel():
        arguments = [a for p in parts for a in (p, p.stride(0), p.shape[1])]
        block = launch.power_of_two(max(p.shape[1] for p in parts), most=BLOCK)
        with launch.on_device_of(x):
            _quantise_joined_kernel[(x.shape[0],)](
                *arguments, *rows, BLOCK=block, num_warps=max(1, min(8, block // 512))
            )
    return landed(rows)


@_quantise_joined.register_fake
def _(x, y, z):
    return fake_rows(x.new_empty(x.shape[0], sum(0 if p is None else p.shape[1] for p in (x, y, z))))


def quantise_joined(parts: Sequence[Tensor]) -> Rows:
    """Rows of the parts side by side, one scale a row for all. parts: two or three (M, N_i) of one dtype, any row stride."""
    if not 2 <= len(parts) <= JOINED:
        raise ValueError(f"quantise_joined: {len(parts)} tensors, wanted 2 or {JOINED}")
    if not parts[0].is_cuda:
        return quantise_rows_reference(torch.cat(list(parts), dim=1))
    x, y, *z = (launch.with_unit_columns(p) for p in parts)
    return Rows(*_quantise_joined(x, y, z[0] if z else None))


SCALES = 16
"""Scales of a weight's row that are tried, evenly over an octave; a whole octave further the same roundings come again."""
SEARCHED = 1 << 24
"""Numbers whose scales are searched at one time: some 0.3 GiB of fp32 beside them."""


def closest_rows(x: Tensor) -> Rows:
    """Rows of x: (M, N), by the scale with the smallest squared error of a row, among those from its largest value over 448 on.

    For what is quantised once: the rounding steps of e4m3 lie where the scale puts them, and over a row of some hundred numbers luck differs.
    Plain torch on any device.
    """
    M, N = x.shape
    q, scale = torch.empty(M, N, dtype=DTYPE, device=x.device), torch.empty(M, 1, dtype=torch.float32, device=x.device)
    rows = max(1, SEARCHED // max(N, 1))
    for part, q_part, scale_part in zip(x.split(rows), q.split(rows), scale.split(rows), strict=True):
        wide = part.float()
        least = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        smallest = torch.full_like(least, torch.inf)
        scale_part.copy_(least)  # of a row with NaN none is better
        for i in range(SCALES):
            tried = least * 2.0 ** (i / SCALES)
            codes = (wide / tried).clamp_(-LARGEST, LARGEST).to(DTYPE)
            error = (codes.float() * tried - wide).square_().sum(-1, keepdim=True)
            better = error < smallest
            smallest = torch.where(better, error, smallest)
            scale_part.copy_(torch.where(better, tried, scale_part))
        q_part.copy_((wide / scale_part).clamp_(-LARGEST, LARGEST).to(DTYPE))
    return Rows(q, scale)


def quantise_weight(weight: Tensor) -> Weight:
    """Both layouts of a (N, K) weight, each quantised from it by its own rows."""
    return Weight(*closest_rows(weight), *closest_rows(weight.t().contiguous()))


def quantise_weights(weights: Sequence[Tensor]) -> list[Weight]:
    """Of linears that read one input, (N_i, K) each: their columns lie side by side under common scales, so that the gradient of the
    input is one product (`joined_columns`)."""
    columns, column_scale = closest_rows(torch.cat([w.t() for w in weights], dim=1))
    parts = columns.split([w.shape[0] for w in weights], dim=1)
    return [Weight(*closest_rows(w), part, column_scale) for w, part in zip(weights, parts, strict=True)]


def joined_columns(weights: Sequence[Weight]) -> Tensor | None:
    """(K, sum of N) e4m3 where the column layouts lie side by side in one tensor under common scales, in this order; else None.

    Whoever copies a weight alone takes it out of its tensor: then each is multiplied by itself, with the same numbers.
    """
    first = weights[0].by_column
    end = first.data_ptr()
    for weight in weights:
        columns = weight.by_column
        same = columns.stride() == first.stride() and columns.data_ptr() == end
        if not same or weight.column_scale.data_ptr() != weights[0].column_scale.data_ptr():
            return None
        end += columns.shape[1]
    width = sum(w.by_column.shape[1] for w in weights)
    return first.as_strided((first.shape[0], width), (first.stride(0), 1)) if first.stride(0) == width else None


def product(q: Tensor, scale: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(T, N) = (q * scale) @ W.T + bias."""
    y = _scaled(q, scale, weight.by_row, weight.row_scale, dtype)
    return y if bias is None else y.add_(bias.to(dtype))


def product_back(q: Tensor, scale: Tensor, columns: Tensor, column_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, K) = (q * scale) @ W, for a gradient of the output. columns: (K, N), of one weight or joined."""
    return _scaled(q.contiguous(), scale, columns.contiguous(), column_scale, dtype)


def _scaled(q: Tensor, scale: Tensor, other: Tensor, other_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, N) of q (M, K) and other (N, K), both by row."""
    if q.is_cuda:
        return torch._scaled_mm(
            q, other.t(), scale_a=scale, scale_b=other_scale.t(), out_dtype=dtype, use_fast_accum=True
        )
    return ((q.float() * scale) @ (other.float() * other_scale).t()).to(dtype)


def why_not(weight: Tensor, capability: tuple[int, int] | None) -> str | None:
    """Why a (N, K) weight cannot be held and multiplied in FP8 on a device of this compute capability (None: not CUDA)."""
    if capability is not None and capability < (8, 9):
        return f"FP8 products need compute capability 8.9 (Ada, Hopper or newer), this GPU has {capability[0]}.{capability[1]}"
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        return f"both sides of a weight have to be multiples of 16, this one is {weight.shape[0]} x {weight.shape[1]}"
    return None
