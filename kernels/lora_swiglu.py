"""Gated activations whose inputs still lack their low-rank branches: y = activation(gate + s_g b_g') * (up + s_u b_u').

T tokens, N columns, r rank. A branch added to a (T, N) tensor by a product of its own reads and writes all of it; here each tile
takes its branches while it is in registers anyway, as dots over the rank. Backward makes the two inputs again, adds the branch of
`grad` that comes from the linear behind, and gives both gradients (and y) as swiglu.py does. The same bytes as there, and T r + N r.
A step of other ops: no gradient of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch
from rft.kernels.swiglu import Activation, _activate, _check_activation, gated_activation_reference

BLOCK_T = 32
BLOCK_N = 128
NUM_WARPS = 4
"""8192 x 14336 at rank 16: 0.252 ms forward (two branches added by products of their own and the activation: 0.56), 0.482 backward (0.93), of
nine tiles tried the fastest both ways (bench/kernels/tune.py, H200)."""
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
def _tile(
    x_ptr, x_stride, left_ptr, left_stride, right_ptr, right_stride, r, row, cols, in_rows, in_cols,
    R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[row, cols] with its branch, fp32. R = 0: it has none."""
    x = tl.load(x_ptr + row * x_stride + cols, mask=in_rows & in_cols, other=0.0).to(tl.float32)
    if R > 0:
        rank = tl.arange(0, R)
        kind = x_ptr.dtype.element_ty
        left = tl.load(left_ptr + row * left_stride + rank[None, :], mask=in_rows & (rank < r)[None, :], other=0.0)
        right = tl.load(
            right_ptr + tl.trans(cols) * right_stride + rank[None, :],
            mask=tl.trans(in_cols) & (rank < r)[None, :],
            other=0.0,
        )
        x = tl.dot(left.to(kind), tl.trans(right.to(kind)), x, input_precision=PRECISION)
    return x


@triton.jit
def _place(N, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows (BLOCK_T, 1), columns (1, BLOCK_N)): neighbouring programs share rows."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(N, BLOCK_N)
    row = (program // blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = (program % blocks).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row[:, None], cols[None, :]


@triton.jit
def _lora_forward_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, out_ptr,
    gl_ptr, gl_stride, gr_ptr, gr_stride, g_rank, ul_ptr, ul_stride, ur_ptr, ur_stride, u_rank, T, N,
    KIND: tl.constexpr, R_G: tl.constexpr, R_U: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, cols = _place(N, BLOCK_T, BLOCK_N)
    in_rows, in_cols = row < T, cols < N
    g = _tile(
        gate_ptr, gate_stride, gl_ptr, gl_stride, gr_ptr, gr_stride, g_rank, row, cols, in_rows, in_cols, R_G, PRECISION
    )
    u = _tile(
        up_ptr, up_stride, ul_ptr, ul_stride, ur_ptr, ur_stride, u_rank, row, cols, in_rows, in_cols, R_U, PRECISION
    )
    a, _ = _activate(g, KIND)
    tl.store(out_ptr + row * N + cols, a * u, mask=in_rows & in_cols)


@triton.jit
def _lora_backward_kernel(
    grad_ptr, grad_stride, gate_ptr, gate_stride, up_ptr, up_stride, d_gate_ptr, d_up_ptr, out_ptr,
    dl_ptr, dl_stride, dr_ptr, dr_stride, d_rank,
    gl_ptr, gl_stride, gr_ptr, gr_stride, g_rank, ul_ptr, ul_stride, ur_ptr, ur_stride, u_rank, T, N,
    KIND: tl.constexpr, R_D: tl.constexpr, R_G: tl.constexpr, R_U: tl.constexpr, PRECISION: tl.constexpr,
    WANT_OUTPUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, cols = _place(N, BLOCK_T, BLOCK_N)
    in_rows, in_cols = row < T, cols < N
    mask = in_rows & in_cols
    g = _tile(
        gate_ptr, gate_stride, gl_ptr, gl_stride, gr_ptr, gr_stride, g_rank, row, cols, in_rows, in_cols, R_G, PRECISION
    )
    u = _tile(
        up_ptr, up_stride, ul_ptr, ul_stride, ur_ptr, ur_stride, u_rank, row, cols, in_rows, in_cols, R_U, PRECISION
    )
    d = _tile(
        grad_ptr, grad_stride, dl_ptr, dl_stride, dr_ptr, dr_stride, d_rank, row, cols, in_rows, in_cols, R_D, PRECISION
    )
    a, slope = _activate(g, KIND)
    tl.store(d_gate_ptr + row * N + cols, d * u * slope, mask=mask)
    tl.store(d_up_ptr + row * N + cols, d * a, mask=mask)
    if WANT_OUTPUT:
        tl.store(out_ptr + row * N + cols, a * u, mask=mask)


def _arguments(left: Tensor | None, right: Tensor | None) -> tuple:
    """(left, its stride, right, its stride, rank) of a branch for the kernel."""
    if left is None or right is None:
        return None, 0, None, 0, 0
    return left, left.stride(0), right, right.stride(0), left.shape[1]


def _padded(left: Tensor | None) -> int:
    return 0 if left is None else max(16, launch.power_of_two(left.shape[1], most=MAX_RANK))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _grid(T: int, N: int) -> tuple[int]:
    return (triton.cdiv(T, BLOCK_T) * triton.cdiv(N, BLOCK_N),)


@torch.library.custom_op("rft::lora_gated_activation", mutates_args=())
def _lora_gated_activation(
    gate: Tensor, up: Tensor, gl: Tensor | None, gr: Tensor | None, ul: Tensor | None, ur: Tensor | None, activation: str
) -> Tensor:  # fmt: skip
    (T, N), out = gate.shape, torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if T * N:
        with launch.on_device_of(gate):
            _lora_forward_kernel[_grid(T, N)](
                gate, gate.stride(0), up, up.stride(0), out, *_arguments(gl, gr), *_arguments(ul, ur), T, N,
                KIND=activation, R_G=_padded(gl), R_U=_padded(ul), PRECISION=_precision(gate), BLOCK_T=BLOCK_T, BLOCK_N=BLOCK_N,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return out


@_lora_gated_activation.register_fake
def _(gate, up, gl, gr, ul, ur, activation):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("rft::lora_gated_activation_backward", mutates_args=())
def _lora_gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, dl: Tensor | None, dr: Tensor | None, gl: Tensor | None, gr: Tensor | None,
    ul: Tensor | None, ur: Tensor | None, activation: str, want_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_gate, d_up, y or an empty tensor)."""
    T, N = gate.shape
    d_gate, d_up, out = _three(gate, want_output)
    if T * N:
        with launch.on_device_of(gate):
            _lora_backward_kernel[_grid(T, N)](
                grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), d_gate, d_up, out,
                *_arguments(dl, dr), *_arguments(gl, gr), *_arguments(ul, ur), T, N,
                KIND=activation, R_D=_padded(dl), R_G=_padded(gl), R_U=_padded(ul), PRECISION=_precision(gate),
                WANT_OUTPUT=want_output, BLOCK_T=BLOCK_T, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
            )  # fmt: skip
    return d_gate, d_up, out


def _three(gate: Tensor, want_output: bool) -> tuple[Tensor, Tensor, Tensor]:
    d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    return d_gate, d_up, torch.empty(gate.shape if want_output else (0,), dtype=gate.dtype, device=gate.device)


@_lora_gated_activation_backward.register_fake
def _(grad, gate, up, dl, dr, gl, gr, ul, ur, activation, want_output):
    return _three(gate, want_output)


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


def lora_gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_branch: LowRank | None, gate_branch: LowRank | None, up_branch: LowRank | None,
    activation: Activation = "silu", *, want_output: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """(y or None, gradient of gate, gradient of up) where the gradient of y is grad + its branch. All (T, N), results contiguous."""
    _check_activation(activation)
    _check(gate, up, grad, branches=(grad_branch, gate_branch, up_branch))
    grad, gate, up = (launch.with_unit_columns(t) for t in (grad, gate, up))
    d_gate, d_up, out = _lora_gated_activation_backward(
        grad, gate, up, *_flat(grad_branch, gate_branch, up_branch), activation, want_output
    )
    return out if want_output else None, d_gate, d_up
