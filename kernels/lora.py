"""Both small gradients of a low-rank branch from one reading of the large one. T tokens, N columns, r rank.

Of y = x @ W.T + scale * s @ B.T with s = x @ A.T, the backward pass needs scale * dy @ B (T, r) and scale * dy.T @ s (N, r). Each is
a skinny product bound by reading dy; here one kernel makes both from a tile while it is on the chip. Its parts are added in a
fixed order by a second kernel, so that repeats are bit-equal. Larger ranks take the two products. A step of other ops'
backward passes: it has no gradient itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

BLOCK_T = 128
BLOCK_N = 256
NUM_WARPS = 8
NUM_STAGES = 3
PROGRAMS_PER_MULTIPROCESSOR = 1
MAX_RANK = 32
"""Above it the kernel is bound by arithmetic and two plain products are faster: at r = 64, 0.22 ms against 0.38 for 16384 x 14336; at
r = 16, 0.23 against 0.15 (bench/kernels/lora.py, H200)."""


def lowrank_gradients_reference(dy: Tensor, s: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """scale times (dy @ B, dy.T @ s) in fp32 torch; the first in the dtype of s, the second in fp32."""
    dy = dy.float() * scale
    return (dy @ B.float()).to(s.dtype), dy.t() @ s.float()


@triton.jit
def _lowrank_kernel(
    dy_ptr, dy_stride, s_ptr, s_stride, b_ptr, b_stride, ds_ptr, db_ptr, T, N, r, rows_per_program,
    PRECISION: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of program 0's axis, a range of tokens of axis 1: ds of these columns alone, dB of these tokens alone."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, R)
    b_mask = (cols < N)[:, None] & (rank < r)[None, :]
    b = tl.load(b_ptr + cols[:, None] * b_stride + rank[None, :], mask=b_mask, other=0.0).to(dy_ptr.dtype.element_ty)
    db = tl.zeros((BLOCK_N, R), tl.float32)
    first = tl.program_id(1) * rows_per_program
    ds_ptr += tl.program_id(0).to(tl.int64) * T * r
    for start in tl.range(first, tl.minimum(first + rows_per_program, T), BLOCK_T, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        in_range = (row < T)[:, None]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=in_range & (cols < N)[None, :], other=0.0)
        s_mask = in_range & (rank < r)[None, :]
        s = tl.load(s_ptr + row[:, None] * s_stride + rank[None, :], mask=s_mask, other=0.0).to(dy_ptr.dtype.element_ty)
        tl.store(ds_ptr + row[:, None] * r + rank[None, :], tl.dot(dy, b, input_precision=PRECISION), mask=s_mask)
        db = tl.dot(tl.trans(dy), s, db, input_precision=PRECISION)
    db_ptr += tl.program_id(1).to(tl.int64) * N * r
    tl.store(db_ptr + cols[:, None] * r + rank[None, :], db, mask=b_mask)


@triton.jit
def _add_up(parts_ptr, out_ptr, num_parts, N, scale, block, BLOCK: tl.constexpr):
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts_ptr + part * N + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total * scale, mask=mask)


@triton.jit
def _add_parts_kernel(
    ds_parts_ptr, ds_ptr, num_ds_parts, ds_size, db_parts_ptr, db_ptr, num_db_parts, db_size, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """The parts of both, in one launch."""
    block, ds_blocks = tl.program_id(0), tl.cdiv(ds_size, BLOCK)
    if block < ds_blocks:
        _add_up(ds_parts_ptr, ds_ptr, num_ds_parts, ds_size, scale, block, BLOCK)
    else:
        _add_up(db_parts_ptr, db_ptr, num_db_parts, db_size, scale, block - ds_blocks, BLOCK)


@torch.library.custom_op("rft::lowrank_gradients", mutates_args=())
def _lowrank_gradients(dy: Tensor, s: Tensor, B: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    (T, N), r = dy.shape, s.shape[1]
    ds = torch.empty(T, r, dtype=s.dtype, device=s.device)
    if not T or not N or not r:
        return ds.zero_(), dy.new_zeros(N, r, dtype=torch.float32)
    if r > MAX_RANK:
        wide = dy.dtype == torch.float32
        ds = (dy @ B.to(dy.dtype)).mul_(scale).to(s.dtype)
        return ds, (dy.t() @ s if wide else torch.mm(dy.t(), s, out_dtype=torch.float32)).mul_(scale)
    dB = dy.new_empty(N, r, dtype=torch.float32)
    R = max(16, launch.power_of_two(r, most=MAX_RANK))
    # dB's sums stay in registers, the tiles in flight in 227 KiB of shared memory.
    block_n = max(16, launch.power_of_two(N, most=BLOCK_N * 2 // dy.element_size() * 32 // max(R, 32)))
    column_blocks = triton.cdiv(N, block_n)
    token_ranges = max(1, PROGRAMS_PER_MULTIPROCESSOR * launch.num_multiprocessors(dy.device) // column_blocks)
    rows = triton.cdiv(triton.cdiv(T, token_ranges), BLOCK_T) * BLOCK_T
    token_ranges = triton.cdiv(T, rows)
    ds_parts = dy.new_empty(column_blocks, T, r, dtype=torch.float32)
    db_parts = dy.new_empty(token_ranges, N, r, dtype=torch.float32)
    with launch.on_device_of(dy):
        _lowrank_kernel[(column_blocks, token_ranges)](
            dy, dy.stride(0), s, s.stride(0), B, B.stride(0), ds_parts, db_parts, T, N, r, rows,
            PRECISION="ieee" if dy.dtype == torch.float32 else "tf32", R=R, BLOCK_T=BLOCK_T, BLOCK_N=block_n,
            STAGES=NUM_STAGES, num_warps=NUM_WARPS,
        )  # fmt: skip
        _add_parts_kernel[(triton.cdiv(ds.numel(), 1024) + triton.cdiv(dB.numel(), 1024),)](
            ds_parts, ds, column_blocks, ds.numel(), db_parts, dB, token_ranges, dB.numel(), scale, BLOCK=1024
        )
    return ds, dB


@_lowrank_gradients.register_fake
def _(dy, s, B, scale):
    ds = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    return ds, dy.new_empty(dy.shape[1], s.shape[1], dtype=torch.float32)


def lowrank_gradients(dy: Tensor, s: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """scale times (dy @ B, in the dtype of s; dy.T @ s, fp32). dy: (T, N), s: (T, r), B: (N, r), any row strides.

    Products in the dtype of dy, sums in fp32.
    """
    T, N, r = dy.shape[0], dy.shape[1], s.shape[-1]
    if s.shape != (T, r) or B.shape != (N, r):
        raise ValueError(
            f"lowrank_gradients: dy {tuple(dy.shape)}, s {tuple(s.shape)}, B {tuple(B.shape)}: wanted (T, N), (T, r), (N, r)"
        )
    return _lowrank_gradients(*(launch.with_unit_columns(t) for t in (dy, s, B)), scale)
