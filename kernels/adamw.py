"""AdamW over fp32 weights in one launch for many tensors: reads a bf16 or fp32 gradient, clips it, updates weight and moments, and
writes the narrow copy that the model computes with.

m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g g, w = w (1 - lr decay) - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps), with g the
gradient times `factor` (decoupled weight decay, Loshchilov and Hutter 2019; as torch.optim.AdamW). 28 bytes an element with a bf16
gradient and copy, where clipping, update and copying as passes of their own move 44 to 52. Bound by memory.
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

CHUNK = 1 << 15
"""Elements a program walks over."""
BLOCK = 512
NUM_WARPS = 4
"""7.38 ms for 10^9 weights with bf16 gradients and copies, 3.8 TB/s (torch's fused AdamW without clipping and copies: 8.06), of five pairs tried
the fastest (bench/kernels/tune.py, H200)."""
ALIGNED = 16
"""Bytes at which every tensor begins, so that loads are wide."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Update(NamedTuple):
    """One weight of a step. weight, exp_avg, exp_avg_sq: fp32; gradient: fp32, bf16 or fp16; copy: bf16 or fp16, or None; all of one
    size and contiguous. step: from 1, this one counted."""

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None
    step: int


def adamw_reference(
    update: Update,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, exp_avg, exp_avg_sq) after the step, in fp64."""
    w, g, m, v = (t.double() for t in update[:4])
    g = g if factor is None else g * factor.double()
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    denominator = (v / (1 - betas[1] ** update.step)).sqrt() + eps
    return w * (1 - lr * weight_decay) - lr / (1 - betas[0] ** update.step) * m / denominator, m, v


@triton.jit
def _adamw_kernel(
    tensors_ptr, rates_ptr, chunks_ptr, factor_ptr, beta1, beta2, eps,
    GRADIENT: tl.constexpr, COPY: tl.constexpr, HAS_FACTOR: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tensors: (number, 6) addresses of weight, gradient, moments and copy, and the size; rates: (number, 3) of lr / (1 - b1^t),
    1 / sqrt(1 - b2^t), 1 - lr decay; chunks: (programs, 2) which tensor and which of its chunks."""
    chunk = chunks_ptr + 2 * tl.program_id(0)
    which, first = tl.load(chunk).to(tl.int64), tl.load(chunk + 1).to(tl.int64) * CHUNK
    row = tensors_ptr + 6 * which
    w_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    g_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRADIENT)), 16)
    m_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    v_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    size = tl.load(row + 5)
    rates = rates_ptr + 3 * which
    step_size, inverse_root, keep = tl.load(rates), tl.load(rates + 1), tl.load(rates + 2)
    factor = tl.load(factor_ptr).to(tl.float32) if HAS_FACTOR else 1.0
    for start in range(0, CHUNK, BLOCK):
        at = tl.multiple_of(first + start, BLOCK) + tl.arange(0, BLOCK)
        mask = at < size
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32) * factor
        w = tl.load(w_ptr + at, mask=mask, other=0.0)
        m = tl.load(m_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        w = w * keep - step_size * m / (tl.sqrt(v) * inverse_root + eps)
        tl.store(w_ptr + at, w, mask=mask)
        tl.store(m_ptr + at, m, mask=mask)
        tl.store(v_ptr + at, v, mask=mask)
        if COPY is not None:
            copy_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(COPY)), 16)
            tl.store(copy_ptr + at, w.to(COPY), mask=mask)


def serves(update: Update) -> bool:
    """Whether the kernel takes these tensors, where they lie and as they lie."""
    tensors = [t for t in update[:5] if isinstance(t, Tensor)]
    wide = (update.weight, update.exp_avg, update.exp_avg_sq)
    return (
        (update.weight.is_cuda or launch.INTERPRETED)
        and all(t.dtype == torch.float32 for t in wide)
        and update.gradient.dtype in _TYPES
        and (update.copy is None or update.copy.dtype in _TYPES)
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
        and all(t.is_contiguous() and t.data_ptr() % ALIGNED == 0 and t.device == update.weight.device for t in tensors)
        and all(t.numel() == update.weight.numel() for t in tensors)
    )


@lru_cache(maxsize=64)
def _chunks_of(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs, 2) int32 on the device: which tensor, which of its chunks."""
    counts = torch.tensor([-(-size // CHUNK) for size in sizes])
    which = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    begun = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return torch.stack([which, torch.arange(len(which)) - begun], 1).to(torch.int32).to(device)


def adamw(
    updates: Sequence[Update], *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """Update weights, moments and copies in place. factor: scalar on the device by which gradients are multiplied (clipping).

    All on one device, each as `serves` asks: raises ValueError where one is not. The host waits for nothing.
    """
    groups: dict[tuple[torch.dtype, torch.dtype | None], list[Update]] = {}
    for update in updates:
        if not serves(update):
            raise ValueError(
                f"adamw: a weight {tuple(update.weight.shape)} {update.weight.dtype} with a gradient {tuple(update.gradient.shape)} "
                f"{update.gradient.dtype}: wanted contiguous fp32 weights and moments of one size on a GPU, {ALIGNED}-byte aligned"
            )
        if update.weight.numel():
            groups.setdefault((update.gradient.dtype, None if update.copy is None else update.copy.dtype), []).append(
                update
            )
    for (gradient, copy), group in groups.items():
        device = group[0].weight.device
        tensors = [
            [*(t.data_ptr() for t in u[:4]), 0 if u.copy is None else u.copy.data_ptr(), u.weight.numel()]
            for u in group
        ]
        rates = [
            [lr / (1 - betas[0] ** u.step), (1 - betas[1] ** u.step) ** -0.5, 1 - lr * weight_decay] for u in group
        ]
        chunks = _chunks_of(tuple(u.weight.numel() for u in group), device)
        with launch.on_device_of(group[0].weight):
            _adamw_kernel[(len(chunks),)](
                _sent(torch.tensor(tensors, dtype=torch.int64), device), _sent(torch.tensor(rates, dtype=torch.float32), device),
                chunks, factor, betas[0], betas[1], eps, GRADIENT=_TYPES[gradient], COPY=None if copy is None else _TYPES[copy],
                HAS_FACTOR=factor is not None, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """To the device without the host waiting."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
