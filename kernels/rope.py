"""Rotary position embedding of queries and keys in one launch. B batch, T tokens, H heads, E head size, R rotated columns.

Pair i of a head is (x[i], x[i + R/2]), or (x[2 i], x[2 i + 1]) if interleaved; it turns by the angle whose cosine and sine are
cos[t, i] and sin[t, i]. Columns from R on pass through. Nothing is saved but the tables: backward turns the other way.
4 bytes an element each way in bf16; fp32 in registers. Scaling of any kind (Llama 3, YaRN) is in the tables.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

PAIRS_AT_ONCE = 512
NUM_WARPS = 4
"""Pairs of one tile, heads times pairs of a head: 0.170 ms both ways for 16384 x 32 + 8 heads of 128, of 12 combinations tried
the fastest (bench/kernels/tune.py, H200)."""


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """In plain torch and fp32, in the dtypes of q and k."""
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    turned, passed = x[..., : 2 * half].float(), x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    first, second = first * c - second * s, second * c + first * s
    turned = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([turned.to(x.dtype), passed], -1)


@triton.jit
def _turn_heads(
    x_ptr, x_head_stride, out_ptr, num_heads, cos, sin, E, HALF,
    INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """All heads of one token, out of x (any head stride) into out (heads contiguous)."""
    for start in range(0, num_heads, BLOCK_H):
        head = start + tl.arange(0, BLOCK_H)
        x_row = x_ptr + head.to(tl.int64)[:, None] * x_head_stride
        out_row = out_ptr + head[:, None] * E
        if INTERLEAVED:
            cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
            mask = (head < num_heads)[:, None] & (cols < 2 * HALF)
            pairs = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
            first, second = tl.split(tl.reshape(pairs, (BLOCK_H, BLOCK_HALF, 2)))
            pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
            tl.store(out_row + cols, tl.reshape(pairs, (BLOCK_H, 2 * BLOCK_HALF)), mask=mask)
        else:
            cols = tl.arange(0, BLOCK_HALF)[None, :]
            mask = (head < num_heads)[:, None] & (cols < HALF)
            first = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(x_row + HALF + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_row + cols, first * cos - second * sin, mask=mask)
            tl.store(out_row + HALF + cols, second * cos + first * sin, mask=mask)
        if BLOCK_REST > 0:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            mask = (head < num_heads)[:, None] & (rest < E)
            tl.store(out_row + rest, tl.load(x_row + rest, mask=mask, other=0.0), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr, q_batch, q_head, q_token, k_ptr, k_batch, k_head, k_token, q_out_ptr, k_out_ptr,
    cos_ptr, cos_batch, cos_token, cos_col, sin_ptr, sin_batch, sin_token, sin_col,
    T, H_Q, H_K, E, HALF,
    BACKWARD: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // T, program % T
    cols = tl.arange(0, BLOCK_HALF)
    mask = cols < HALF
    cos = tl.load(cos_ptr + batch * cos_batch + token * cos_token + cols * cos_col, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + batch * sin_batch + token * sin_token + cols * sin_col, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    _turn_heads(
        q_ptr + batch * q_batch + token * q_token, q_head, q_out_ptr + program * H_Q * E, H_Q, cos[None, :], sin[None, :], E,
        HALF, INTERLEAVED, BLOCK_Q, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip
    _turn_heads(
        k_ptr + batch * k_batch + token * k_token, k_head, k_out_ptr + program * H_K * E, H_K, cos[None, :], sin[None, :], E,
        HALF, INTERLEAVED, BLOCK_K, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


def _token_major(like: Tensor) -> Tensor:
    """An empty (B, H, T, E) tensor whose memory is (B, T, H, E), as attention over packed tokens wants it."""
    B, H, T, E = like.shape
    return torch.empty(B, T, H, E, dtype=like.dtype, device=like.device).transpose(1, 2)


@launch.op("rft::rope")
def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k = launch.with_unit_columns(q), launch.with_unit_columns(k)
    q_out, k_out = _token_major(q), _token_major(k)
    (B, H_q, T, E), H_k, half = q.shape, k.shape[1], cos.shape[-1]
    rest = E - 2 * half
    block_half = launch.power_of_two(half, most=1024)
    heads = max(1, PAIRS_AT_ONCE // block_half)
    if B * T:
        with launch.on_device_of(q):
            _rope_kernel[(B * T,)](
                q, *q.stride()[:3], k, *k.stride()[:3], q_out, k_out,
                cos, *_table_strides(cos), sin, *_table_strides(sin), T, H_q, H_k, E, half,
                BACKWARD=backward, INTERLEAVED=interleaved, BLOCK_Q=launch.power_of_two(H_q, most=heads),
                BLOCK_K=launch.power_of_two(H_k, most=heads), BLOCK_HALF=block_half,
                BLOCK_REST=launch.power_of_two(rest, most=1024) if rest else 0, num_warps=NUM_WARPS,
            )  # fmt: skip
    return q_out, k_out


def _table_strides(table: Tensor) -> tuple[int, int, int]:
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1), table.stride(2)


@_rope.register_fake
def _(q, k, cos, sin, interleaved, backward):
    return _token_major(q), _token_major(k)


def _save(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    dq, dk = _rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.backward)
    return dq, dk, None, None, None, None


_rope.register_autograd(_backward, setup_context=_save)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Turned q and k, (B, H, T, E) over memory (B, T, H, E). q, k: (B, H, T, E), heads may differ, any strides.

    cos, sin: (1 or B, T, R/2), one angle a pair, any strides and float dtype, no gradient: a table that transformers has made
    twice as wide goes in as `cos[..., : R // 2]` where its halves repeat, as `cos[..., ::2]` where its neighbours do.
    """
    B, _, T, E = q.shape
    if k.shape[0] != B or k.shape[2:] != q.shape[2:]:
        raise ValueError(f"rope: q {tuple(q.shape)} and k {tuple(k.shape)} may differ in heads alone")
    if (
        cos.shape != sin.shape
        or cos.dim() != 3
        or cos.shape[0] not in (1, B)
        or cos.shape[1] != T
        or 2 * cos.shape[2] > E
    ):
        raise ValueError(
            f"rope: cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not fit q {tuple(q.shape)}: wanted (1 or B, T, R/2), R <= E"
        )
    return _rope(q, k, cos.detach(), sin.detach(), interleaved, False)
