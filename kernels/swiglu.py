"""Gated activations: y = activation(gate) * up, for SwiGLU, GEGLU and their like. M rows, N columns; fp32 in registers.

Saves gate and up and nothing else; the backward pass recomputes the activation. The two may be halves of one fused tensor, whose
gradient then comes as one tensor. 6 bytes an element forward, 10 backward, in bf16.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import fp8, launch

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu2"]
ACTIVATIONS = get_args(Activation)

BLOCK = 2048
NUM_WARPS = 8
"""0.863 ms both ways at 16384 x 14336, of 10 pairs tried the fastest (bench/kernels/tune.py, H200)."""

ROW_BLOCK = 4096
"""Columns at a time where a program has a whole row, since its largest value is needed before anything can be stored as FP8; it goes twice
over the row, the second time from L2."""

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
INVERSE_SQRT_TWO_PI = tl.constexpr(1 / math.sqrt(2 * math.pi))
SQRT_TWO_OVER_PI = tl.constexpr(math.sqrt(2 / math.pi))
GELU_CUBIC = tl.constexpr(0.044715)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up in plain torch and fp32, in the dtype of `gate`."""
    g = gate.float()
    if activation == "silu":
        a = torch.nn.functional.silu(g)
    elif activation == "relu2":
        a = g.relu().square()
    else:
        a = torch.nn.functional.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (a * up.float()).to(gate.dtype)


@triton.jit
def _activate(g, KIND: tl.constexpr):
    """(activation, its derivative) at g, fp32."""
    if KIND == "silu":
        s = tl.sigmoid(g)
        return g * s, s * (1.0 + g * (1.0 - s))
    elif KIND == "gelu_tanh":
        cubic = g * g * GELU_CUBIC
        t = 2.0 * tl.sigmoid((g + g * cubic) * SQRT_TWO_OVER_PI * 2.0) - 1.0
        inner = (1.0 + 3.0 * cubic) * SQRT_TWO_OVER_PI
        return 0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * inner
    elif KIND == "gelu_erf":
        cdf = 0.5 * (1.0 + tl.erf(g * SQRT_HALF))
        return g * cdf, cdf + g * INVERSE_SQRT_TWO_PI * tl.exp(-0.5 * g * g)
    else:
        tl.static_assert(KIND == "relu2", "unknown activation")
        r = tl.maximum(g, 0.0)
        return r * r, 2.0 * r


@triton.jit
def _forward_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, out_ptr, out_stride, N, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(N, BLOCK)
    row = program // blocks
    cols = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    g = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    a, _ = _activate(g, KIND)
    tl.store(out_ptr + row * out_stride + cols, a * u, mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, grad_stride, gate_ptr, gate_stride, up_ptr, up_stride, d_gate_ptr, d_up_ptr, d_stride, out_ptr, N,
    KIND: tl.constexpr, WANT_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out: what the forward pass gave, contiguous, made again on the way."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(N, BLOCK)
    row = program // blocks
    cols = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    d = tl.load(grad_ptr + row * grad_stride + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    a, slope = _activate(g, KIND)
    tl.store(d_gate_ptr + row * d_stride + cols, d * u * slope, mask=mask)
    tl.store(d_up_ptr + row * d_stride + cols, d * a, mask=mask)
    if WANT_OUTPUT:
        tl.store(out_ptr + row * N + cols, a * u, mask=mask)


@triton.jit
def _forward_fp8_kernel(
    gate_ptr, gate_stride, up_ptr, up_stride, out_ptr, q_ptr, scale_ptr, N,
    KIND: tl.constexpr, WANT_OUTPUT: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. What is quantised is the result rounded to the type of `out`, as a pass of its own would read it."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    cols = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    h = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        mask = start + cols < N
        g = tl.load(gate_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        a, _ = _activate(g, KIND)
        h = (a * u).to(out_ptr.dtype.element_ty).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(h))
        if WANT_OUTPUT:
            tl.store(out_ptr + row * N + start + cols, h, mask=mask)
    scale = fp8.scale_of(tl.max(largest, axis=0))
    tl.store(scale_ptr + row, scale)
    if ONE_BLOCK:
        tl.store(q_ptr + row * N + cols, fp8.quotient(h, scale).to(q_ptr.dtype.element_ty), mask=cols < N)
    else:
        for start in range(0, N, BLOCK):
            mask = start + cols < N
            g = tl.load(gate_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
            u = tl.load(up_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
            a, _ = _activate(g, KIND)
            h = (a * u).to(out_ptr.dtype.element_ty).to(tl.float32)
            q = fp8.quotient(h, scale).to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + row * N + start + cols, q, mask=mask)


@triton.jit
def _backward_fp8_kernel(
    grad_ptr, grad_stride, gate_ptr, gate_stride, up_ptr, up_stride, d_gate_ptr, d_up_ptr, out_ptr,
    gate_q_ptr, gate_scale_ptr, up_q_ptr, up_scale_ptr, N,
    KIND: tl.constexpr, WANT_OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the gradients of gate and up as `_backward_kernel` stores them, and both quantised."""
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_stride
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    cols = tl.arange(0, BLOCK)
    gate_largest = tl.zeros((BLOCK,), tl.float32)
    up_largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        mask = start + cols < N
        d = tl.load(grad_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        a, slope = _activate(g, KIND)
        d_gate = (d * u * slope).to(d_gate_ptr.dtype.element_ty)
        d_up = (d * a).to(d_up_ptr.dtype.element_ty)
        tl.store(d_gate_ptr + row * N + start + cols, d_gate, mask=mask)
        tl.store(d_up_ptr + row * N + start + cols, d_up, mask=mask)
        if WANT_OUTPUT:
            tl.store(out_ptr + row * N + start + cols, a * u, mask=mask)
        gate_largest = tl.maximum(gate_largest, tl.abs(d_gate.to(tl.float32)))
        up_largest = tl.maximum(up_largest, tl.abs(d_up.to(tl.float32)))
    gate_scale = fp8.scale_of(tl.max(gate_largest, axis=0))
    up_scale = fp8.scale_of(tl.max(up_largest, axis=0))
    tl.store(gate_scale_ptr + row, gate_scale)
    tl.store(up_scale_ptr + row, up_scale)
    for start in range(0, N, BLOCK):  # made again: what was stored may not yet be seen by other threads of the program
        mask = start + cols < N
        d = tl.load(grad_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        a, slope = _activate(g, KIND)
        d_gate = (d * u * slope).to(d_gate_ptr.dtype.element_ty).to(tl.float32)
        d_up = (d * a).to(d_up_ptr.dtype.element_ty).to(tl.float32)
        gate_q = fp8.quotient(d_gate, gate_scale).to(gate_q_ptr.dtype.element_ty)
        up_q = fp8.quotient(d_up, up_scale).to(up_q_ptr.dtype.element_ty)
        tl.store(gate_q_ptr + row * N + start + cols, gate_q, mask=mask)
        tl.store(up_q_ptr + row * N + start + cols, up_q, mask=mask)


def _rows_of(*tensors: Tensor) -> tuple[int, int]:
    """(M, N) to launch over: all of it as one row where every tensor is contiguous."""
    M, N = tensors[0].shape
    return (min(M, 1), M * N) if all(t.is_contiguous() for t in tensors) else (M, N)


def _launch_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    M, N = _rows_of(gate, up, out)
    if M * N:
        with launch.on_device_of(gate):
            _forward_kernel[(M * triton.cdiv(N, BLOCK),)](
                gate,
                gate.stride(0),
                up,
                up.stride(0),
                out,
                out.stride(0),
                N,
                KIND=activation,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return out


def _launch_backward(
    grad: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor, activation: str, out: Tensor | None = None
) -> None:
    grad = launch.with_unit_columns(grad)
    M, N = _rows_of(gate, grad, up, d_gate, d_up)
    if M * N:
        with launch.on_device_of(gate):
            _backward_kernel[(M * triton.cdiv(N, BLOCK),)](
                grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), d_gate, d_up, d_gate.stride(0), out, N,
                KIND=activation, WANT_OUTPUT=out is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip


@torch.library.custom_op("rft::gated_activation", mutates_args=())
def _gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return _launch_forward(gate, up, activation)


@_gated_activation.register_fake
def _(gate, up, activation):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@torch.library.custom_op("rft::gated_activation_backward", mutates_args=())
def _gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_up = torch.empty_like(d_gate)
    _launch_backward(grad, gate, up, d_gate, d_up, activation)
    return d_gate, d_up


@_gated_activation_backward.register_fake
def _(grad, gate, up, activation):
    return tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))


@torch.library.custom_op("rft::gated_activation_again", mutates_args=())
def _gated_activation_again(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3))
    _launch_backward(grad, gate, up, d_gate, d_up, activation, out)
    return out, d_gate, d_up


@_gated_activation_again.register_fake
def _(grad, gate, up, activation):
    return tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3))


@torch.library.custom_op("rft::gated_activation_fp8", mutates_args=())
def _gated_activation_fp8(
    gate: Tensor, up: Tensor, activation: str, want_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M, N = gate.shape
    out = torch.empty(M if want_output else 0, N, dtype=gate.dtype, device=gate.device)
    rows = fp8.empty_rows(M, N, gate.device)
    if M and N:
        block = launch.power_of_two(N, most=16384)
        one = block >= N
        with launch.on_device_of(gate):
            _forward_fp8_kernel[(M,)](
                gate, gate.stride(0), up, up.stride(0), out, *rows, N, KIND=activation, WANT_OUTPUT=want_output,
                ONE_BLOCK=one, BLOCK=block if one else ROW_BLOCK, num_warps=max(1, min(16, block // 512)) if one else 8,
            )  # fmt: skip
    return out, *fp8.landed(rows)


@_gated_activation_fp8.register_fake
def _(gate, up, activation, want_output):
    return gate.new_empty(gate.shape[0] if want_output else 0, gate.shape[1]), *fp8.fake_rows(gate)


def gated_activation_fp8(
    gate: Tensor, up: Tensor, activation: Activation = "silu", *, want_output: bool
) -> tuple[Tensor | None, fp8.Rows]:
    """(activation(gate) * up or None, the same quantised by row) of (M, N) tensors: a step of other ops' forward passes."""
    _check_activation(activation)
    out, *rows = _gated_activation_fp8(gate, up, activation, want_output)
    return out if want_output else None, fp8.Rows(*rows)


@torch.library.custom_op("rft::gated_activation_backward_fp8", mutates_args=())
def _gated_activation_backward_fp8(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, want_output: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad = launch.with_unit_columns(grad)
    M, N = gate.shape
    d_gate, d_up = (torch.empty(M, N, dtype=gate.dtype, device=gate.device) for _ in range(2))
    out = torch.empty(M if want_output else 0, N, dtype=gate.dtype, device=gate.device)
    gate_rows, up_rows = (fp8.empty_rows(M, N, gate.device) for _ in range(2))
    if M and N:
        with launch.on_device_of(gate):
            _backward_fp8_kernel[(M,)](
                grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), d_gate, d_up, out, *gate_rows, *up_rows, N,
                KIND=activation, WANT_OUTPUT=want_output, BLOCK=launch.power_of_two(N, most=ROW_BLOCK), num_warps=8,
            )  # fmt: skip
    return out, d_gate, d_up, *fp8.landed(gate_rows), *fp8.landed(up_rows)


@_gated_activation_backward_fp8.register_fake
def _(grad, gate, up, activation, want_output):
    d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    out = gate.new_empty(gate.shape[0] if want_output else 0, gate.shape[1])
    return out, d_gate, d_up, *fp8.fake_rows(gate), *fp8.fake_rows(gate)


def gated_activation_backward_fp8(
    grad: Tensor, gate: Tensor, up: Tensor, activation: Activation = "silu", *, want_output: bool = False
) -> tuple[Tensor | None, Tensor, Tensor, fp8.Rows, fp8.Rows]:
    """What `gated_activation_backward` gives, and the gradients of gate and up quantised by row."""
    _check_activation(activation)
    out, d_gate, d_up, *rows = _gated_activation_backward_fp8(grad, gate, up, activation, want_output)
    return out if want_output else None, d_gate, d_up, fp8.Rows(*rows[:2]), fp8.Rows(*rows[2:])


def gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: Activation = "silu", *, want_output: bool = False
) -> tuple[Tensor | None, Tensor, Tensor]:
    """(activation(gate) * up or None, gradient of gate, gradient of up) of (M, N) tensors: a step of other ops' backward passes.

    12 bytes an element in bf16, 10 without the output.
    """
    _check_activation(activation)
    if want_output:
        return _gated_activation_again(grad, gate, up, activation)
    return None, *_gated_activation_backward(grad, gate, up, activation)


def _save(ctx, inputs, output):
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, grad):
    return *_gated_activation_backward(grad, *ctx.saved_tensors, ctx.activation), None


_gated_activation.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("rft::gated_activation_fused", mutates_args=())
def _gated_activation_fused(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _launch_forward(gate, up, activation)


@_gated_activation_fused.register_fake
def _(gate_up, activation):
    return torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)


@torch.library.custom_op("rft::gated_activation_fused_backward", mutates_args=())
def _gated_activation_fused_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    (gate, up), (d_gate, d_up) = gate_up.chunk(2, -1), d_gate_up.chunk(2, -1)
    _launch_backward(grad, gate, up, d_gate, d_up, activation)
    return d_gate_up


@_gated_activation_fused_backward.register_fake
def _(grad, gate_up, activation):
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


def _save_fused(ctx, inputs, output):
    gate_up, ctx.activation = inputs
    ctx.save_for_backward(gate_up)


def _backward_fused(ctx, grad):
    return _gated_activation_fused_backward(grad, *ctx.saved_tensors, ctx.activation), None


_gated_activation_fused.register_autograd(_backward_fused, setup_context=_save_fused)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_activation: unknown activation {activation!r}, wanted one of {', '.join(ACTIVATIONS)}")


def gated_activation(gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up. gate, up: (..., N) of one float dtype, any row stride. The result is contiguous."""
    _check_activation(activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gated_activation: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ"
        )
    return _gated_activation(launch.as_rows(gate), launch.as_rows(up), activation).view(gate.shape)


def gated_activation_fused(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up of gate_up = [gate | up]: (..., 2 N) -> (..., N). Its gradient is one (..., 2 N) tensor."""
    _check_activation(activation)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gated_activation_fused: {gate_up.shape[-1]} columns are not two halves")
    out = _gated_activation_fused(launch.as_rows(gate_up), activation)
    return out.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
