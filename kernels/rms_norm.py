"""RMSNorm: y = x * rsqrt(mean(x^2) + eps) * (weight + offset), alone or of x + residual. M rows, N columns; sums in fp32.

The result may come quantised to FP8 beside itself (fp8.py), one byte an element more instead of a pass of three.

Saves rstd (M,) fp32 and what was normalised. 4 bytes an element forward and 6 backward in bf16 (8 and 8 with the addition).
Backward, a program walks over many rows and keeps its share of the weight's gradient in registers; a second kernel adds the
shares in a fixed order, so that repeats are bit-equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft.kernels import fp8, launch

TILE = 8192
PROGRAMS_PER_MULTIPROCESSOR = 1
STAGES = 3
"""A tile of 8192 elements (narrow rows share one), a backward program for each multiprocessor, three tiles in flight: 0.170 ms both
ways at 16384 x 4096, of 48 combinations tried the fastest (bench/kernels/tune.py, H200); without the flight 0.210."""
SHARED_BYTES = 200 << 10
"""Shared memory for tiles in flight."""


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast_before_weight: bool = True
) -> Tensor:
    """In plain torch, sums in fp32; the result in the dtype of x."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        return (normed.to(x.dtype) * (weight.float() + offset)).to(x.dtype)
    return (normed * (weight.float() + offset)).to(x.dtype)


@triton.jit
def _forward_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, weight_ptr, y_ptr, sum_ptr, rstd_ptr, q_ptr, scale_ptr, M, N, eps, offset,
    CAST_BEFORE_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, QUANTISE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(
            x_ptr.dtype.element_ty
        )  # what is stored is what is normalised
        tl.store(sum_ptr + row[:, None] * N + cols[None, :], x, mask=mask)
    x = x.to(tl.float32)
    w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
    normed = x * rstd[:, None]
    if CAST_BEFORE_WEIGHT:
        normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = (normed * w[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * N + cols[None, :], y, mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < M)
    if QUANTISE:  # what was stored, so that the numbers are those of a pass of its own
        y = y.to(tl.float32)
        scale = fp8.scale_of(tl.max(tl.abs(y), axis=1))
        q = fp8.quotient(y, scale[:, None]).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + row[:, None] * N + cols[None, :], q, mask=mask)
        tl.store(scale_ptr + row, scale, mask=row < M)


@triton.jit
def _backward_kernel(
    dy_ptr, dy_stride, d_sum_ptr, d_sum_stride, x_ptr, x_stride, weight_ptr, rstd_ptr, dx_ptr, share_ptr, M, N, offset,
    CAST_BEFORE_WEIGHT: tl.constexpr, HAS_D_SUM: tl.constexpr, NEED_WEIGHT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)
    w = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    share = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < M, other=0.0)[:, None]
        normed = x * rstd
        d_normed = dy * w[None, :]
        dx = (d_normed - normed * (tl.sum(d_normed * normed, axis=1) / N)[:, None]) * rstd
        if HAS_D_SUM:
            dx += tl.load(d_sum_ptr + row[:, None] * d_sum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * N + cols[None, :], dx, mask=mask)
        if NEED_WEIGHT:
            if CAST_BEFORE_WEIGHT:
                normed = normed.to(dx_ptr.dtype.element_ty).to(tl.float32)
            share += dy * normed
    if NEED_WEIGHT:
        tl.store(share_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(share, axis=0), mask=cols < N)


@triton.jit
def _add_shares_kernel(share_ptr, out_ptr, num_shares, N, SHARES: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((SHARES, BLOCK_N), tl.float32)
    for start in range(0, num_shares, SHARES):
        share = start + tl.arange(0, SHARES)
        mask = (share < num_shares)[:, None] & (cols < N)[None, :]
        total += tl.load(share_ptr + share[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)


def _tile(N: int) -> dict[str, int]:
    block = launch.power_of_two(N, most=1 << 17)
    rows = max(1, min(64, TILE // block))
    return {"ROWS": rows, "BLOCK_N": block, "num_warps": max(4, min(32, rows * block // 1024))}


def _launch_forward(x, residual, weight, eps, offset, cast_before_weight, quantise=False):
    """(y, rstd, sum or None, quantised rows or None)"""
    M, N = x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    rstd = x.new_empty(M, dtype=torch.float32)
    rows = fp8.empty_rows(M, N, x.device) if quantise else None
    tile = _tile(N)
    if M:
        with launch.on_device_of(x):
            _forward_kernel[(launch.cdiv(M, tile["ROWS"]),)](
                x, x.stride(0), residual, 0 if residual is None else residual.stride(0), weight, y, total, rstd,
                *(rows or (None, None)), M, N, eps, offset, CAST_BEFORE_WEIGHT=cast_before_weight,
                HAS_RESIDUAL=residual is not None, QUANTISE=quantise, **tile,
            )  # fmt: skip
    return y, rstd, total, None if rows is None else fp8.landed(rows)


# Four forward ops, since what an op gives out is fixed: alone or of a sum, plain or with its quantised rows behind.


@launch.op("rft::rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast_before_weight: bool) -> tuple[Tensor, Tensor]:
    y, rstd, _, _ = _launch_forward(x, None, weight, eps, offset, cast_before_weight)
    return y, rstd


@launch.op("rft::rms_norm_fp8")
def _rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, offset: float, cast_before_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, rstd, _, rows = _launch_forward(x, None, weight, eps, offset, cast_before_weight, True)
    return y, rstd, rows.q, rows.scale


@launch.op("rft::add_rms_norm")
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_before_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total, _ = _launch_forward(x, residual, weight, eps, offset, cast_before_weight)
    return y, total, rstd


@launch.op("rft::add_rms_norm_fp8")
def _add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, cast_before_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y, rstd, total, rows = _launch_forward(x, residual, weight, eps, offset, cast_before_weight, True)
    return y, total, rstd, rows.q, rows.scale


def _fake_y(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_rstd(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


@_rms_norm.register_fake
def _(x, weight, eps, offset, cast_before_weight):
    return _fake_y(x), _fake_rstd(x)


@_rms_norm_fp8.register_fake
def _(x, weight, eps, offset, cast_before_weight):
    return _fake_y(x), _fake_rstd(x), *fp8.fake_rows(x)


@_add_rms_norm.register_fake
def _(x, residual, weight, eps, offset, cast_before_weight):
    return _fake_y(x), _fake_y(x), _fake_rstd(x)


@_add_rms_norm_fp8.register_fake
def _(x, residual, weight, eps, offset, cast_before_weight):
    return _fake_y(x), _fake_y(x), _fake_rstd(x), *fp8.fake_rows(x)


@launch.op("rft::rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, d_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, cast_before_weight: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    M, N = x.shape
    dy = launch.with_unit_columns(dy)
    d_sum = None if d_sum is None else launch.with_unit_columns(d_sum)
    dx = torch.empty(M, N, dtype=x.dtype, device=x.device)
    d_weight = weight.new_zeros(N if need_weight else 0)
    if not M:
        return dx, d_weight
    tile = _tile(N)
    programs = min(launch.cdiv(M, tile["ROWS"]), PROGRAMS_PER_MULTIPROCESSOR * launch.num_multiprocessors(x.device))
    in_flight = tile["ROWS"] * tile["BLOCK_N"] * x.element_size() * (2 if d_sum is None else 3)
    shares = x.new_empty(programs if need_weight else 0, N, dtype=torch.float32)
    with launch.on_device_of(x):
        _backward_kernel[(programs,)](
            dy, dy.stride(0), d_sum, 0 if d_sum is None else d_sum.stride(0), x, x.stride(0), weight, rstd, dx, shares,
            M, N, offset, CAST_BEFORE_WEIGHT=cast_before_weight, HAS_D_SUM=d_sum is not None, NEED_WEIGHT=need_weight,
            STAGES=max(1, min(STAGES, 1 + SHARED_BYTES // in_flight)), **tile,
        )  # fmt: skip
        if need_weight:
            _add_shares_kernel[(launch.cdiv(N, 32),)](shares, d_weight, programs, N, SHARES=64, BLOCK_N=32)
    return dx, d_weight


@_rms_norm_backward.register_fake
def _(dy, d_sum, x, weight, rstd, offset, cast_before_weight, need_weight):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, weight.new_empty(x.shape[1] if need_weight else 0)


def _save(ctx, inputs, output):
    x, weight, _, ctx.offset, ctx.cast_before_weight = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 5
    x, weight, rstd = ctx.saved_tensors
    need_weight = ctx.needs_input_grad[1]
    dx, d_weight = _rms_norm_backward(dy, None, x, weight, rstd, ctx.offset, ctx.cast_before_weight, need_weight)
    return dx, d_weight if need_weight else None, None, None, None


_rms_norm.register_autograd(_backward, setup_context=_save)
_rms_norm_fp8.register_autograd(_backward, setup_context=_save)


def _save_add(ctx, inputs, output):
    _, _, weight, _, ctx.offset, ctx.cast_before_weight = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward_add(ctx, dy, d_sum, *_):
    if dy is None:
        return d_sum, d_sum, None, None, None, None
    total, weight, rstd = ctx.saved_tensors
    need_weight = ctx.needs_input_grad[2]
    dx, d_weight = _rms_norm_backward(dy, d_sum, total, weight, rstd, ctx.offset, ctx.cast_before_weight, need_weight)
    return dx, dx, d_weight if need_weight else None, None, None, None


_add_rms_norm.register_autograd(_backward_add, setup_context=_save_add)
_add_rms_norm_fp8.register_autograd(_backward_add, setup_context=_save_add)


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"{op}: x has {x.shape[-1]} columns, weight has shape {tuple(weight.shape)}")


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast_before_weight: bool = True
) -> Tensor:
    """RMSNorm over the last dim. x: (..., N), any float dtype and row stride; weight: (N,). The result is contiguous.

    offset: added to the weight in fp32 (1 for Gemma). cast_before_weight: round the normalised x to its dtype before the weight
    multiplies it, as Llama does; Gemma, OLMo 2 and GPT-OSS round once, after.
    """
    _check("rms_norm", x, weight)
    return _rms_norm(launch.as_rows(x), weight.contiguous(), eps, offset, cast_before_weight)[0].view(x.shape)


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast_before_weight: bool = True
) -> tuple[Tensor, fp8.Rows]:
    """(`rms_norm`, the same quantised by row): the rows (M, N) are those of `fp8.quantise_rows`, and have no gradient."""
    _check("rms_norm_fp8", x, weight)
    y, _, *rows = _rms_norm_fp8(launch.as_rows(x), weight.contiguous(), eps, offset, cast_before_weight)
    return y.view(x.shape), fp8.Rows(*rows)


class _Beside(torch.autograd.Function):
    """The norm of x, and x itself for whoever else reads it: what comes back for x is added in the norm's own backward pass."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast_before_weight, quantise):
        rows = launch.as_rows(x)
        y, rstd, *quantised = (_rms_norm_fp8 if quantise else _rms_norm)(rows, weight, eps, offset, cast_before_weight)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.casting = offset, cast_before_weight
        ctx.mark_non_differentiable(*quantised)
        ctx.set_materialize_grads(False)
        return y.view(x.shape), x, *quantised

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, d_x, *_):
        rows, weight, rstd = ctx.saved_tensors
        if dy is None:
            return d_x, None, None, None, None, None
        need_weight = ctx.needs_input_grad[1]
        d_beside = None if d_x is None else launch.as_rows(d_x)
        dx, d_weight = _rms_norm_backward(launch.as_rows(dy), d_beside, rows, weight, rstd, *ctx.casting, need_weight)
        return dx.view(dy.shape), d_weight if need_weight else None, None, None, None, None


def rms_norm_beside(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = True,
    quantise: bool = False,
) -> tuple[Tensor, Tensor, fp8.Rows | None]:
    """(`rms_norm`, x, and with `quantise` the rows of `rms_norm_fp8`), for a residual stream: everybody else reads the second result, so
    that the gradient of x is summed in one pass."""
    _check("rms_norm_beside", x, weight)
    y, same, *rows = _Beside.apply(x, weight.contiguous(), eps, offset, cast_before_weight, quantise)
    return y, same, fp8.Rows(*rows) if rows else None


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass; the sum is rounded to the dtype of x before it is normalised.

    x, residual: (..., N) of one dtype. Backward adds the gradient of the sum in the same pass.
    """
    _check_add("add_rms_norm", x, residual, weight)
    y, total, _ = _add_rms_norm(
        launch.as_rows(x), launch.as_rows(residual), weight.contiguous(), eps, offset, cast_before_weight
    )
    return y.view(x.shape), total.view(x.shape)


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = True,
) -> tuple[Tensor, Tensor, fp8.Rows]:
    """(both results of `add_rms_norm`, the first quantised by row as in `rms_norm_fp8`)."""
    _check_add("add_rms_norm_fp8", x, residual, weight)
    y, total, _, *rows = _add_rms_norm_fp8(
        launch.as_rows(x), launch.as_rows(residual), weight.contiguous(), eps, offset, cast_before_weight
    )
    return y.view(x.shape), total.view(x.shape), fp8.Rows(*rows)


def _check_add(op: str, x: Tensor, residual: Tensor, weight: Tensor) -> None:
    _check(op, x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} differ"
        )
