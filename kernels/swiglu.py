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

from rft.kernels import launch

Activation = Literal["silu", "gelu_tanh", "gelu_erf", "relu2"]
ACTIVATIONS = get_args(Activation)

BLOCK = 2048
NUM_WARPS = 8
"""0.863 ms both ways at 16384 x 14336, of 10 pairs tried the fastest (bench/kernels/tune.py, H200)."""

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


def _rows_of(*tensors: Tensor) -> tuple[int, int]:
    """(M, N) to launch over: all of it as one row where every tensor is contiguous."""
    M, N = tensors[0].shape
    return (min(M, 1), M * N) if all(t.is_contiguous() for t in tensors) else (M, N)


def _launch_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    M, N = _rows_of(gate, up, out)
    if M * N:
        with launch.on_device_of(gate):
            _forward_kernel[(M * launch.cdiv(N, BLOCK),)](
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
            _backward_kernel[(M * launch.cdiv(N, BLOCK),)](
                grad, grad.stride(0), gate, gate.stride(0), up, up.stride(0), d_gate, d_up, d_gate.stride(0), out, N,
                KIND=activation, WANT_OUTPUT=out is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip


@launch.op("rft::gated_activation")
def _gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return _launch_forward(gate, up, activation)


@_gated_activation.register_fake
def _(gate, up, activation):
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@launch.op("rft::gated_activation_backward")
def _gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    d_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    d_up = torch.empty_like(d_gate)
    _launch_backward(grad, gate, up, d_gate, d_up, activation)
    return d_gate, d_up


@_gated_activation_backward.register_fake
def _(grad, gate, up, activation):
    return tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))


@launch.op("rft::gated_activation_again")
def _gated_activation_again(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out, d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3))
    _launch_backward(grad, gate, up, d_gate, d_up, activation, out)
    return out, d_gate, d_up


@_gated_activation_again.register_fake
def _(grad, gate, up, activation):
    return tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(3))


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


@launch.op("rft::gated_activation_fused")
def _gated_activation_fused(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return _launch_forward(gate, up, activation)


@_gated_activation_fused.register_fake
def _(gate_up, activation):
    return torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)


@launch.op("rft::gated_activation_fused_backward")
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
