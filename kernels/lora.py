"""Both small gradients of low-rank branches from one reading of the large ones. T tokens, N columns, r rank.

Of y = x @ W.T + scale * s @ B.T with s = x @ A.T, the backward pass needs scale * dy @ B (T, r) and scale * dy.T @ s (N, r). Each is
a skinny product bound by reading dy; here one kernel makes both from a tile while it is on the chip. Its parts are added in a
fixed order by a second kernel, so that repeats are bit-equal. Branches of linears that share an input (q, k and v; gate and up) take one
launch of each kernel together, and their ds come side by side. Larger ranks take the two products. A step of other ops' backward passes:
it has no gradient itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

TILES = ((128, 256, 3), (128, 256, 2), (64, 256, 2), (64, 128, 2), (32, 128, 2))
"""(tokens, columns, tiles in flight) of bf16: the first that fits shared memory is taken. The very first is the fastest on an H200
(bench/kernels/tune.py); the others are for ranks and GPUs that it does not fit, and were not measured."""
NUM_WARPS = 8
MOST_WAVES = 6
"""Of programs, one a multiprocessor at a time."""
TOGETHER = 3
"""Most branches of one launch."""
MAX_RANK = 32
"""Above it the kernel is bound by arithmetic and two plain products are faster: at r = 64, 0.22 ms against 0.38 for 16384 x 14336; at
r = 16, 0.23 against 0.15 (bench/kernels/lora.py, H200)."""


class Pair(NamedTuple):
    """dy (T, N), s (T, r) and B (N, r) of a branch, any row strides."""

    dy: Tensor
    s: Tensor
    B: Tensor
    scale: float = 1.0


def lowrank_gradients_reference(dy: Tensor, s: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """scale times (dy @ B, dy.T @ s) in fp32 torch; the first in the dtype of s, the second in fp32."""
    dy = dy.float() * scale
    return (dy @ B.float()).to(s.dtype), dy.t() @ s.float()


@triton.jit
def _of(block, x_blocks, y_blocks, x, y, z, BRANCHES: tl.constexpr):
    """That of the branch to which a column block belongs."""
    if BRANCHES == 1:
        return x
    elif BRANCHES == 2:
        return tl.where(block < x_blocks, x, y)
    else:
        return tl.where(block < x_blocks, x, tl.where(block < x_blocks + y_blocks, y, z))


@triton.jit
def _lowrank_kernel(
    x_dy, x_dy_stride, x_s, x_s_stride, x_b, x_b_stride, x_N, x_blocks,
    y_dy, y_dy_stride, y_s, y_s_stride, y_b, y_b_stride, y_N, y_blocks,
    z_dy, z_dy_stride, z_s, z_s_stride, z_b, z_b_stride, z_N, z_blocks,
    ds_ptr, db_ptr, T, r, rows_per_program,
    BRANCHES: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of up to three branches on program 0's axis, a range of tokens on axis 1: ds of these columns alone, dB of these tokens
    alone. blocks: a branch's blocks of columns. The branch is chosen before the loop, since each loop would take shared memory of its own."""
    block = tl.program_id(0)
    dy_ptr = _of(block, x_blocks, y_blocks, x_dy, y_dy, z_dy, BRANCHES)
    dy_stride = _of(block, x_blocks, y_blocks, x_dy_stride, y_dy_stride, z_dy_stride, BRANCHES)
    s_ptr = _of(block, x_blocks, y_blocks, x_s, y_s, z_s, BRANCHES)
    s_stride = _of(block, x_blocks, y_blocks, x_s_stride, y_s_stride, z_s_stride, BRANCHES)
    b_ptr = _of(block, x_blocks, y_blocks, x_b, y_b, z_b, BRANCHES)
    b_stride = _of(block, x_blocks, y_blocks, x_b_stride, y_b_stride, z_b_stride, BRANCHES)
    N = _of(block, x_blocks, y_blocks, x_N, y_N, z_N, BRANCHES)
    cols_before = _of(block, x_blocks, y_blocks, 0, x_N, x_N + y_N, BRANCHES)
    blocks_before = _of(block, x_blocks, y_blocks, 0, x_blocks, x_blocks + y_blocks, BRANCHES)

    cols = (block - blocks_before) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, R)
    b_mask = (cols < N)[:, None] & (rank < r)[None, :]
    b = tl.load(b_ptr + cols[:, None] * b_stride + rank[None, :], mask=b_mask, other=0.0).to(dy_ptr.dtype.element_ty)
    db = tl.zeros((BLOCK_N, R), tl.float32)
    first = tl.program_id(1) * rows_per_program
    ds_ptr += block.to(tl.int64) * T * r
    for start in tl.range(first, tl.minimum(first + rows_per_program, T), BLOCK_T, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        in_range = (row < T)[:, None]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=in_range & (cols < N)[None, :], other=0.0)
        s_mask = in_range & (rank < r)[None, :]
        s = tl.load(s_ptr + row[:, None] * s_stride + rank[None, :], mask=s_mask, other=0.0).to(dy_ptr.dtype.element_ty)
        tl.store(ds_ptr + row[:, None] * r + rank[None, :], tl.dot(dy, b, input_precision=PRECISION), mask=s_mask)
        db = tl.dot(tl.trans(dy), s, db, input_precision=PRECISION)
    db_ptr += (tl.program_id(1).to(tl.int64) * (x_N + y_N + z_N) + cols_before) * r
    tl.store(db_ptr + cols[:, None] * r + rank[None, :], db, mask=b_mask)


@triton.jit
def _sum_of(parts_ptr, num_parts, size, offsets, mask, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts_ptr + part * size + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def _add_parts_kernel(
    ds_parts_ptr, ds_ptr, ds_size, db_parts_ptr, db_ptr, num_db_parts, db_size, r,
    x_blocks, y_blocks, z_blocks, x_scale, y_scale, z_scale, x_db_size, y_db_size, BRANCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts of all, in one launch. ds: (T, BRANCHES * r), branch by branch; ds_size: T * r."""
    program, per_branch = tl.program_id(0), tl.cdiv(ds_size, BLOCK)
    if program < per_branch * BRANCHES:
        branch = program // per_branch
        offsets = (program % per_branch).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        before = tl.where(branch > 0, x_blocks, 0) + tl.where(branch > 1, y_blocks, 0)
        blocks = tl.where(branch == 0, x_blocks, tl.where(branch == 1, y_blocks, z_blocks))
        scale = tl.where(branch == 0, x_scale, tl.where(branch == 1, y_scale, z_scale))
        mask = offsets < ds_size
        total = _sum_of(ds_parts_ptr + before.to(tl.int64) * ds_size, blocks, ds_size, offsets, mask, BLOCK)
        at = (offsets // r) * (BRANCHES * r) + branch * r + offsets % r
        tl.store(ds_ptr + at, total * scale, mask=mask)
    else:
        places = (program - per_branch * BRANCHES).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total_of_B = _sum_of(db_parts_ptr, num_db_parts, db_size, places, places < db_size, BLOCK)
        scales = tl.where(places < x_db_size, x_scale, tl.where(places < x_db_size + y_db_size, y_scale, z_scale))
        tl.store(db_ptr + places, total_of_B * scales, mask=places < db_size)


class Tile(NamedTuple):
    """Of the kernel."""

    tokens: int
    columns: int
    stages: int

    def shared_bytes(self, R: int, itemsize: int) -> int:
        """Tiles of dy and s in flight, B, and ds on its way out, as Triton lays them out."""
        in_flight = self.stages * self.tokens * (self.columns + R) * itemsize
        return in_flight + self.columns * R * itemsize + self.tokens * R * 4


@lru_cache
def _tile(width: int, R: int, itemsize: int, shared: int) -> Tile:
    """For tensors of this many columns at most. dB's sums stay in registers."""
    for tokens, columns, stages in TILES:
        tile = Tile(tokens, max(16, launch.power_of_two(width, most=columns * 2 // itemsize)), stages)
        if tile.shared_bytes(R, itemsize) <= shared:
            return tile
    return tile


@lru_cache
def _rows_per_program(T: int, column_blocks: int, multiprocessors: int, block_t: int) -> int:
    """Of a range of tokens: those that end soonest, where a multiprocessor takes one program after another and a start costs a tile."""
    tiles = launch.cdiv(T, block_t)

    def ends(each: int) -> int:
        return launch.cdiv(column_blocks * launch.cdiv(tiles, each), multiprocessors) * (each + 1)

    most = max(1, MOST_WAVES * multiprocessors // column_blocks)
    return block_t * min({launch.cdiv(tiles, n) for n in range(1, most + 1)}, key=lambda each: (ends(each), -each))


@launch.op("rft::lowrank_gradients")
def _lowrank_gradients(
    dys: Sequence[Tensor], s: Sequence[Tensor], Bs: Sequence[Tensor], scales: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """(ds side by side (T, branches * r), dBs one behind the other, flat)."""
    dy, (T, r) = dys[0], s[0].shape
    widths = [t.shape[1] for t in dys]
    ds, dB = _empty_results(dys, s)
    if not T or not sum(widths) or not r:
        return ds.zero_(), dB.zero_()
    R = max(16, launch.power_of_two(r, most=MAX_RANK))
    tile = _tile(max(widths), R, dy.element_size(), launch.shared_memory(dy.device))
    blocks = [launch.cdiv(n, tile.columns) for n in widths]
    rows = _rows_per_program(T, sum(blocks), launch.num_multiprocessors(dy.device), tile.tokens)
    token_ranges = launch.cdiv(T, rows)
    ds_parts = dy.new_empty(sum(blocks), T, r, dtype=torch.float32)
    db_parts = dy.new_empty(token_ranges, dB.numel(), dtype=torch.float32)
    none = (dy, 0, dy, 0, dy, 0, 0, 0)
    given = [
        (*(a for t in (x, y, z) for a in (t, t.stride(0))), n, k)
        for x, y, z, n, k in zip(dys, s, Bs, widths, blocks, strict=True)
    ]
    absent = TOGETHER - len(given)
    with launch.on_device_of(dy):
        _lowrank_kernel[(sum(blocks), token_ranges)](
            *(a for g in (*given, *[none] * absent) for a in g), ds_parts, db_parts, T, r, rows,
            BRANCHES=len(given), PRECISION="ieee" if dy.dtype == torch.float32 else "tf32", R=R, BLOCK_T=tile.tokens, BLOCK_N=tile.columns,
            STAGES=tile.stages, num_warps=NUM_WARPS,
        )  # fmt: skip
        _add_parts_kernel[(len(given) * launch.cdiv(T * r, 1024) + launch.cdiv(dB.numel(), 1024),)](
            ds_parts, ds, T * r, db_parts, dB, token_ranges, dB.numel(), r, *blocks, *[0] * absent, *scales, *[0.0] * absent,
            *(n * r for n in (*widths, 0)[:2]), BRANCHES=len(given), BLOCK=1024,
        )  # fmt: skip
    return ds, dB


def _empty_results(dys: Sequence[Tensor], s: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    T, r = s[0].shape
    ds = torch.empty(T, len(dys) * r, dtype=s[0].dtype, device=s[0].device)
    return ds, dys[0].new_empty(sum(t.shape[1] for t in dys) * r, dtype=torch.float32)


@_lowrank_gradients.register_fake
def _(dys, s, Bs, scales):
    return _empty_results(dys, s)


def lowrank_gradients(pairs: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
    """(scale * dy @ B of each side by side (T, sum of r), in the dtype of s; scale * dy.T @ s (N, r) of each, fp32).

    Products in the dtype of dy, sums in fp32. Pairs of one T, dtype and rank share their launches.
    """
    for dy, s, B, _ in pairs:
        T, N, r = dy.shape[0], dy.shape[1], s.shape[-1]
        if s.shape != (T, r) or B.shape != (N, r):
            raise ValueError(
                f"lowrank_gradients: dy {tuple(dy.shape)}, s {tuple(s.shape)}, B {tuple(B.shape)}: wanted (T, N), (T, r), (N, r)"
            )
    kinds = {(p.dy.shape[0], p.s.shape[1], p.dy.dtype, p.s.dtype) for p in pairs}
    if len(kinds) > 1 or len(pairs) > TOGETHER:
        each = [lowrank_gradients([p]) for p in pairs]
        return torch.cat([ds for ds, _ in each], dim=1), [dB for _, dBs in each for dB in dBs]
    r = pairs[0].s.shape[1]
    if r > MAX_RANK:
        return _two_products(pairs)
    dys, lefts, Bs = ([launch.with_unit_columns(t) for t in tensors] for tensors in list(zip(*pairs, strict=True))[:3])
    ds, flat = _lowrank_gradients(dys, lefts, Bs, [p.scale for p in pairs])
    return ds, [dB.view(-1, r) for dB in flat.split([p.dy.shape[1] * r for p in pairs])]


def _two_products(pairs: Sequence[Pair]) -> tuple[Tensor, list[Tensor]]:
    parts, dBs = [], []
    for dy, s, B, scale in pairs:
        parts.append((dy @ B.to(dy.dtype)).mul_(scale).to(s.dtype))
        wide = dy.dtype == torch.float32
        dBs.append((dy.t() @ s if wide else torch.mm(dy.t(), s, out_dtype=torch.float32)).mul_(scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), dBs
