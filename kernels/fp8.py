"""FP8 (e4m3) products of a frozen weight: rows of the input and of the output gradient quantised, each by its own scale.

T tokens, K inputs, N outputs. x ~ q * scale with one fp32 scale a row, the row's largest value over 448. A weight is quantised once,
in both layouts, since the product needs its second operand with the summed dim contiguous: by row of (N, K) for x @ W.T, by row of
(K, N) for dy @ W. Together they take the bytes of bf16. Sums in fp32; the forward product with the tensor cores' fast accumulation,
the backward one without. A step of other ops' passes: nothing here has a gradient.
Off CUDA the same numbers are multiplied in fp32 (tests).
"""

from __future__ import annotations

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


@torch.library.custom_op("rft::fp8_quantise_rows", mutates_args=())
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


def quantise_weight(weight: Tensor) -> Weight:
    """Both layouts of a (N, K) weight, each quantised from it by its own rows."""
    return Weight(*quantise_rows(weight), *quantise_rows(weight.t().contiguous()))


def product(q: Tensor, scale: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(T, N) = (q * scale) @ W.T + bias."""
    y = _scaled(q, scale, weight.by_row, weight.row_scale, dtype, fast=True)
    return y if bias is None else y.add_(bias.to(dtype))


def product_back(q: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """(T, K) = (q * scale) @ W, for a gradient of the output."""
    return _scaled(q, scale, weight.by_column, weight.column_scale, dtype, fast=False)


def _scaled(q: Tensor, scale: Tensor, other: Tensor, other_scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """(M, N) of q (M, K) and other (N, K), both by row."""
    if q.is_cuda:
        return torch._scaled_mm(
            q, other.t(), scale_a=scale, scale_b=other_scale.t(), out_dtype=dtype, use_fast_accum=fast
        )
    return ((q.float() * scale) @ (other.float() * other_scale).t()).to(dtype)


def why_not(weight: Tensor, capability: tuple[int, int] | None) -> str | None:
    """Why a (N, K) weight cannot be held and multiplied in FP8 on a device of this compute capability (None: not CUDA)."""
    if capability is not None and capability < (8, 9):
        return f"FP8 products need compute capability 8.9 (Ada, Hopper or newer), this GPU has {capability[0]}.{capability[1]}"
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        return f"both sides of a weight have to be multiples of 16, this one is {weight.shape[0]} x {weight.shape[1]}"
    return None
