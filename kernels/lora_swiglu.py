"""Gated activations whose inputs still lack their low-rank branches: y = activation(gate + s_g b_g') * (up + s_u b_u').

T tokens, N columns, r rank. A branch added to a (T, N) tensor by a product of its own reads and writes all of it; here each tile
takes its branches while it is in registers anyway, as dots over the rank. A program walks down a range of rows of its columns, with its part
of every b in registers and the next tiles in flight: these land in shared memory, from where they are read as the dots lay them out, so that
nothing is laid out again on the way in. Backward makes the two inputs again, adds the branch of `grad` that comes from the linear behind,
and gives both gradients (and y) as swiglu.py does. The same bytes as there, and T r + N r. Where that branch's A wants its gradient, left.T @ y,
it is summed up here over each range of rows, and y is neither written nor read; a sum over the ranges in a fixed order follows. A step of
other ops: no gradient of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch
from rft.kernels.swiglu import Activation, _activate, _check_activation, gated_activation_reference

ROWS_FORWARD = 32
ROWS_BACKWARD = 16
BLOCK_N = 128
NUM_WARPS = 4
STAGES_FORWARD = 2
STAGES_BACKWARD = 3
PROGRAMS_PER_MULTIPROCESSOR = 8
"""8192 x 14336 at rank 16: 0.195 ms forward, 0.365 backward (its product with it); without branches 0.163 and 0.335; a tile a program 0.250 and
0.480; branches added by products of their own 0.56 and 0.93. Of 16 tiles tried among the fastest both ways
(H200; bench/kernels/tune.py has these). What was tried and not kept: docs/design-notes.md."""
SHARED_BYTES = 90 << 10
"""Of tiles in flight: what a program may have of shared memory on the smaller GPUs, and some to spare."""
MAX_RANK = 64
"""Above it the dots would cost more than the passes that they save; nothing was tuned for it."""


class LowRank(NamedTuple):
    """left @ right.T, to be added to a (T, N) tensor. left: (T, r), right: (N, r), scales are in it."""

    left: Tensor
    right: Tensor


def lora_gated_activation_reference(
    gate: Tensor, up: Tensor, gate_branch: LowRank | None, up_branch: LowRank | None, activation: Activation = "silu"
) -> Tensor:
    """In plain torch and fp32, in the dtype of `gate`."""
    g, u = _added(gate, gate_branch), _added(up, up_branch)
    return gated_activation_reference(g, u, activation).to(gate.dtype)


def _added(x: Tensor, branch: LowRank | None) -> Tensor:
    return x.float() if branch is None else x.float() + branch.left.float() @ branch.right.float().t()


@triton.jit
def _right(right_ptr, right_stride, r, cols, N, R: tl.constexpr):
    """b of these columns (BLOCK_N, R)."""
    rank = tl.arange(0, R)
    mask = (cols < N)[:, None] & (rank < r)[None, :]
    return tl.load(right_ptr + cols[:, None] * right_stride + rank[None, :], mask=mask, other=0.0)


@triton.jit
def _left(left_ptr, left_stride, r, row, T, R: tl.constexpr):
    """s of these rows (BLOCK_T, R)."""
    rank = tl.arange(0, R)
    mask = (row < T)[:, None] & (rank < r)[None, :]
    return tl.load(left_ptr + row[:, None] * left_stride + rank[None, :], mask=mask, other=0.0)


@triton.jit
def _tile(x_ptr, x_stride, left, right, row, cols, T, N, R: tl.constexpr, PRECISION: tl.constexpr):
    """x[row, cols] with its branch, fp32. left, right: of `_left` and `_right`; R = 0: there is none."""
    mask = (row < T)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if R > 0:
        kind = x_ptr.dtype.element_ty
        x = tl.dot(left.to(kind), tl.trans(right.to(kind)), x, input_precision=PRECISION)
    return x


@triton.jit
def _lora_forward_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, out_ptr,
    gl_ptr, gl_stride, gr_ptr, gr_stride, g_rank, ul_ptr, ul_stride, ur_ptr, ur_stride, u_rank, T, N, rows_per_program,
    KIND: tl.constexpr, R_G: tl.constexpr, R_U: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of program 0's axis, a range of rows of axis 1."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gr = _right(gr_ptr, gr_stride, g_rank, cols, N, R_G) if R_G > 0 else 0
    ur = _right(ur_ptr, ur_stride, u_rank, cols, N, R_U) if R_U > 0 else 0
    first = tl.program_id(1) * rows_per_program
    for start in tl.range(first, tl.minimum(first + rows_per_program, T), BLOCK_T, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        gl = _left(gl_ptr, gl_stride, g_rank, row, T, R_G) if R_G > 0 else 0
        g = _tile(gate_ptr, gate_stride, gl, gr, row, cols, T, N, R_G, PRECISION)
        ul = _left(ul_ptr, ul_stride, u_rank, row, T, R_U) if R_U > 0 else 0
        u = _tile(up_ptr, up_stride, ul, ur, row, cols, T, N, R_U, PRECISION)
        a, _ = _activate(g, KIND)
        tl.store(out_ptr + row[:, None] * N + cols[None, :], a * u, mask=(row < T)[:, None] & (cols < N)[None, :])


@triton.jit
def _lora_backward_kernel(
    grad_ptr, grad_stride, gate_ptr, gate_stride, up_ptr, up_stride, d_gate_ptr, d_up_ptr, out_ptr, product_ptr,
    dl_ptr, dl_stride, dr_ptr, dr_stride, d_rank, gl_ptr, gl_stride, gr_ptr, gr_stride, g_rank,
    ul_ptr, ul_stride, ur_ptr, ur_stride, u_rank, T, N, rows_per_program,
    KIND: tl.constexpr, R_D: tl.constexpr, R_G: tl.constexpr, R_U: tl.constexpr, PRECISION: tl.constexpr,
    WANT_OUTPUT: tl.constexpr, WANT_PRODUCT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns of program 0's axis, a range of rows of axis 1."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dr = _right(dr_ptr, dr_stride, d_rank, cols, N, R_D) if R_D > 0 else 0
    if WANT_PRODUCT:
        product = tl.zeros((R_D, BLOCK_N), tl.float32)
    gr = _right(gr_ptr, gr_stride, g_rank, cols, N, R_G) if R_G > 0 else 0
    ur = _right(ur_ptr, ur_stride, u_rank, cols, N, R_U) if R_U > 0 else 0
    first = tl.program_id(1) * rows_per_program
    for start in tl.range(first, tl.minimum(first + rows_per_program, T), BLOCK_T, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        gl = _left(gl_ptr, gl_stride, g_rank, row, T, R_G) if R_G > 0 else 0
        g = _tile(gate_ptr, gate_stride, gl, gr, row, cols, T, N, R_G, PRECISION)
        ul = _left(ul_ptr, ul_stride, u_rank, row, T, R_U) if R_U > 0 else 0
        u = _tile(up_ptr, up_stride, ul, ur, row, cols, T, N, R_U, PRECISION)
        dl = _left(dl_ptr, dl_stride, d_rank, row, T, R_D) if R_D > 0 else 0
        d = _tile(grad_ptr, grad_stride, dl, dr, row, cols, T, N, R_D, PRECISION)
        a, slope = _activate(g, KIND)
        offsets, mask = row[:, None] * N + cols[None, :], (row < T)[:, None] & (cols < N)[None, :]
        tl.store(d_gate_ptr + offsets, d * u * slope, mask=mask)
        tl.store(d_up_ptr + offsets, d * a, mask=mask)
        y = (a * u).to(gate_ptr.dtype.element_ty)
        if WANT_OUTPUT:
            tl.store(out_ptr + offsets, y, mask=mask)
        if WANT_PRODUCT:  # rows and columns outside are 0 in y: their gate and up were
            product = tl.dot(tl.trans(dl.to(y.dtype)), y, product, input_precision=PRECISION)  # type: ignore[union-attr]
    if WANT_PRODUCT:
        rank = tl.arange(0, R_D)
        product_ptr += tl.program_id(1).to(tl.int64) * d_rank * N
        mask = (rank < d_rank)[:, None] & (cols < N)[None, :]
        tl.store(product_ptr + rank[:, None] * N + cols[None, :], product, mask=mask)


def _arguments(left: Tensor | None, right: Tensor | None) -> tuple:
    """(left, its stride, right, its stride, rank) of a branch for the kernel."""
    if left is None or right is None:
        return None, 0, None, 0, 0
    return left, left.stride(0), right, right.stride(0), left.shape[1]


def _padded(left: Tensor | None) -> int:
    return 0 if left is None else max(16, launch.power_of_two(left.shape[1], most=MAX_RANK))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _ranges(gate: Tensor, block_t: int) -> tuple[tuple[int, int], int]:
    """(the grid: column blocks, ranges of rows; rows of a range)."""
    T, N = gate.shape
    columns = launch.cdiv(N, BLOCK_N)
    ranges = launch.cdiv(PROGRAMS_PER_MULTIPROCESSOR * launch.num_multiprocessors(gate.device), columns)
    rows = launch.cdiv(launch.cdiv(T, ranges), block_t) * block_t
    return (columns, launch.cdiv(T, rows)), rows


def _stages(gate: Tensor, block_t: int, lefts: tuple[Tensor | None, ...], inputs: int, wanted: int) -> int:
    """Tiles in flight that fit."""
    tile = block_t * (inputs * BLOCK_N + sum(map(_padded, lefts))) * gate.element_size()
    return max(1, min(wanted, SHARED_BYTES // tile))


@launch.op("rft::lora_gated_activation")
def _lora_gated_activation(
    gate: Tensor, up: Tensor, gl: Tensor | None, gr: Tensor | None, ul: Tensor | None, ur: Tensor | None, activation: str
) -> Tensor:  # fmt: skip
    (T, N), out = gate.shape, torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if T * N:
        grid, rows = _ranges(gate, ROWS_FORWARD)
        with launch.on_device_of(gate):
            _lora_forward_kernel[grid](
                gate, gate.stride(0), up, up.stride(0), out, *_arguments(gl, gr), *_arguments(ul, ur), T, N, rows,
                KIND=activation, R_G=_padded(gl), R_U=_padded(ul), PRECISION=_precision(gate), BLOCK_T=ROWS_FORWARD, BLOCK_N=BLOCK_N,
                STAGES=_stages(gate, ROWS_FORWARD, (gl, ul), 2, STAGES_FORWARD), num_warps=NUM_WARPS,
            )  # fmt: skip
    return out


@_lora_gated_activation.register_fake
def _(gate, up, gl, gr, ul, ur, activation):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@launch.op("rft::lora_gated_activation_backward")
def _lora_gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, dl: Tensor | None, dr: Tensor | None, gl: Tensor | None, gr: Tensor | None,
    ul: Tensor | None, ur: Tensor | None, activation: str, want_output: bool, want_product: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_gate, d_up, y, dl.T @ y); an empty tensor for what is not wanted."""
    T, N = gate.shape
    d_gate, d_up, out, product = _results(gate, dl, want_output, want_product)
    if not T * N:
        return d_gate, d_up, out, product.zero_()
    grid, rows = _ranges(gate, ROWS_BACKWARD)
    parts = torch.empty(grid[1], *product.shape, dtype=torch.float32, device=gate.device)
    with launch.on_device_of(gate):
        _lora_backward_kernel[grid](
            grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), d_gate, d_up, out, parts,
            *_arguments(dl, dr), *_arguments(gl, gr), *_arguments(ul, ur), T, N, rows,
            KIND=activation, R_D=_padded(dl), R_G=_padded(gl), R_U=_padded(ul), PRECISION=_precision(gate),
            WANT_OUTPUT=want_output, WANT_PRODUCT=want_product, BLOCK_T=ROWS_BACKWARD, BLOCK_N=BLOCK_N,
            STAGES=_stages(gate, ROWS_BACKWARD, (dl, gl, ul), 3, STAGES_BACKWARD), num_warps=NUM_WARPS,
        )  # fmt: skip
    if want_product:
        torch.sum(parts, 0, out=product)
    return d_gate, d_up, out, product


def _results(
    gate: Tensor, dl: Tensor | None, want_output: bool, want_product: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, N = gate.shape
    d_gate, d_up = (torch.empty((T, N), dtype=gate.dtype, device=gate.device) for _ in range(2))
    out = torch.empty((T, N) if want_output else (0,), dtype=gate.dtype, device=gate.device)
    rank = dl.shape[1] if want_product and dl is not None else 0
    return d_gate, d_up, out, torch.empty(rank, N, dtype=torch.float32, device=gate.device)


@_lora_gated_activation_backward.register_fake
def _(grad, gate, up, dl, dr, gl, gr, ul, ur, activation, want_output, want_product):
    return _results(gate, dl, want_output, want_product)


def _check(gate: Tensor, *tensors: Tensor, branches: tuple[LowRank | None, ...]) -> None:
    T, N = gate.shape
    for x in tensors:
        if x.shape != (T, N) or x.dtype != gate.dtype:
            raise ValueError(
                f"lora_gated_activation: {tuple(x.shape)} {x.dtype} beside a gate of {(T, N)} {gate.dtype}"
            )
    for branch in branches:
        if branch is None:
            continue
        left, right = branch
        if left.shape != (T, right.shape[1]) or right.shape[0] != N or not 0 < left.shape[1] <= MAX_RANK:
            raise ValueError(
                f"lora_gated_activation: a branch of {tuple(left.shape)} and {tuple(right.shape)}: wanted ({T}, r) and ({N}, r), "
                f"r from 1 to {MAX_RANK}"
            )


def _flat(*branches: LowRank | None) -> list[Tensor | None]:
    return [None if t is None else launch.with_unit_columns(t) for b in branches for t in (b or (None, None))]


def lora_gated_activation(
    gate: Tensor, up: Tensor, gate_branch: LowRank | None, up_branch: LowRank | None, activation: Activation = "silu"
) -> Tensor:
    """activation(gate + its branch) * (up + its branch), (T, N) and contiguous. gate, up: (T, N) of one dtype, any row stride."""
    _check_activation(activation)
    _check(gate, up, branches=(gate_branch, up_branch))
    gate, up = launch.with_unit_columns(gate), launch.with_unit_columns(up)
    return _lora_gated_activation(gate, up, *_flat(gate_branch, up_branch), activation)


class Gradients(NamedTuple):
    """Of `lora_gated_activation_backward`; None for what was not wanted."""

    gate: Tensor
    up: Tensor
    y: Tensor | None
    product: Tensor | None
    """grad_branch.left.T @ y (r, N), fp32: the gradient of that branch's A."""


def lora_gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_branch: LowRank | None, gate_branch: LowRank | None, up_branch: LowRank | None,
    activation: Activation = "silu", *, want_output: bool = False, want_product: bool = False,
) -> Gradients:  # fmt: skip
    """Gradients where that of y is grad + its branch. grad, gate, up: (T, N) of one dtype, any row stride; results contiguous.

    want_product: needs a branch of grad.
    """
    _check_activation(activation)
    _check(gate, up, grad, branches=(grad_branch, gate_branch, up_branch))
    if want_product and grad_branch is None:
        raise ValueError("lora_gated_activation_backward: a product with the left side of a branch that is not there")
    grad, gate, up = (launch.with_unit_columns(t) for t in (grad, gate, up))
    d_gate, d_up, y, product = _lora_gated_activation_backward(
        grad, gate, up, *_flat(grad_branch, gate_branch, up_branch), activation, want_output, want_product
    )
    return Gradients(d_gate, d_up, y if want_output else None, product if want_product else None)
