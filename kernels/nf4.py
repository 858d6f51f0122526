"""NF4: a frozen weight of N x K in four bits a number, in the format of bitsandbytes (NF4, blocks of 64, double quantisation).

A number is one of 16 levels times its block's scale. Codes lie two in a byte, the first in the high half, row by row; blocks run on over the
ends of rows. Scales, less their mean, are quantised again: 8-bit levels times a fp32 scale for each 256 of them. 4.127 bits a number.
Products read the weight out of one shared buffer, into which it is dequantised just before: `Weight.plain`. No op here has a gradient.
Levels: Dettmers et al. 2023 (QLoRA), appendix E. The 8-bit levels: Dettmers et al. 2021 (8-bit optimizers), section 2.1, "dynamic tree".
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

BLOCK = 64
"""Numbers that share a scale."""
NESTED = 256
"""Scales that share a scale."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BYTES = 1024
"""Of codes that one program reads."""


@lru_cache
def levels(device: torch.device) -> Tensor:
    """(16,) fp32."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


@lru_cache
def scale_levels(device: torch.device) -> Tensor:
    """(256,) fp32, ascending: of seven decades the e-th, from the smallest, is cut evenly into 2^e parts; their middles, with both signs;
    and 0 and 1."""
    found = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1, 2**e + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2
        decade = (10 ** (e - 6) * middles).tolist()
        found += [*decade, *(-m for m in decade)]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


class Weight(NamedTuple):
    """A frozen (N, K) weight."""

    codes: Tensor
    """(N, K / 2) uint8."""
    scales: Tensor
    """(blocks,) uint8: levels of `scale_levels`."""
    nested: Tensor
    """(ceil(blocks / 256),) fp32."""
    offset: Tensor
    """() fp32: mean of the scales."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, K), made anew."""
        return dequantise(self, dtype)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """(N, K) in a buffer that the next call overwrites."""
        return dequantise(self, dtype, out=shared_buffer(self.shape, dtype, self.codes.device))


def why_not(shape: tuple[int, ...] | torch.Size) -> str | None:
    """Why a weight of this shape cannot be held in NF4, or None."""
    if len(shape) != 2 or shape[1] % 2:
        return f"a weight needs two dims and an even number of columns, this one is {' x '.join(map(str, shape))}"
    return None


# ---- quantising: once a weight, in plain torch


@torch.no_grad()
def quantise(weight: Tensor) -> Weight:
    """(N, K) of any float type -> NF4, on its device. Numbers are compared in fp32."""
    why = why_not(weight.shape)
    if why:
        raise ValueError(f"nf4: {why}")
    N, K = weight.shape
    flat = weight.reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    codes = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(blocks, dtype=torch.float32, device=weight.device)
    step = 1 << 18  # blocks at a time: 64 MiB of fp32
    for start in range(0, blocks, step):
        part = flat[start * BLOCK : (start + step) * BLOCK].float()
        if part.numel() % BLOCK:
            part = torch.nn.functional.pad(part, (0, BLOCK - part.numel() % BLOCK))
        part = part.view(-1, BLOCK)
        largest = part.abs().amax(1)
        absmax[start : start + step] = largest
        scaled = part / torch.where(largest > 0, largest, 1.0)[:, None]
        code = torch.bucketize(scaled, _borders(weight.device), out_int32=True).to(torch.uint8).view(-1, 2)
        codes[start * BLOCK // 2 : (start + step) * BLOCK // 2] = code[:, 0] << 4 | code[:, 1]
    return Weight(codes[: N * K // 2].view(N, K // 2), *_quantise_scales(absmax))


@lru_cache
def _borders(device: torch.device) -> Tensor:
    """Halfway between the levels."""
    table = levels(device)
    return (table[:-1] + table[1:]) / 2


def _quantise_scales(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(8-bit levels, fp32 scales of 256, mean)."""
    offset = absmax.mean()
    centred = absmax - offset
    groups = -(-centred.numel() // NESTED)
    padded = torch.nn.functional.pad(centred, (0, groups * NESTED - centred.numel())).view(groups, NESTED)
    nested = padded.abs().amax(1)
    scaled = padded / torch.where(nested > 0, nested, 1.0)[:, None]
    table = scale_levels(absmax.device)
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    return codes.view(-1)[: centred.numel()].clone(), nested, offset


# ---- dequantising


def dequantise_reference(weight: Weight, dtype: torch.dtype) -> Tensor:
    """(N, K) in plain torch: scales and products in fp32, rounded once."""
    device = weight.codes.device
    scales = scale_levels(device)[weight.scales.long()]
    nested = weight.nested.repeat_interleave(NESTED)[: scales.numel()]
    absmax = scales * nested + weight.offset
    flat = weight.codes.reshape(-1)
    both = torch.stack([flat >> 4, flat & 15], dim=1).view(-1)
    numbers = levels(device)[both.long()] * absmax.repeat_interleave(BLOCK)[: both.numel()]
    return numbers.to(dtype).view(weight.shape)


@triton.jit
def _dequantise_kernel(
    codes_ptr, scales_ptr, nested_ptr, offset_ptr, levels_ptr, scale_levels_ptr, out_ptr, count, BYTES: tl.constexpr
):
    """BYTES bytes of codes: 2 BYTES numbers, side by side. 32 bytes share a scale, 8192 a scale of scales."""
    first = tl.program_id(0).to(tl.int64) * BYTES  # int64: a stacked tensor may pass 2^31 numbers
    at = first + tl.arange(0, BYTES)
    inside = at < count
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    block = at // 32
    level = tl.load(scales_ptr + block, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_levels_ptr + level) * tl.load(nested_ptr + block // 256, mask=inside, other=0.0)
    scale = scale + tl.load(offset_ptr)
    high = tl.load(levels_ptr + (code >> 4)) * scale
    low = tl.load(levels_ptr + (code & 15)) * scale
    both = tl.interleave(high, low)
    to = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + to, both.to(out_ptr.dtype.element_ty), mask=to < 2 * count)


@launch.op("rft::nf4_dequantise", changes=("out",))
def _dequantise(codes: Tensor, scales: Tensor, nested: Tensor, offset: Tensor, out: Tensor) -> None:
    count = codes.numel()
    if count:
        with launch.on_device_of(codes):
            _dequantise_kernel[(launch.cdiv(count, _BYTES),)](
                codes, scales, nested, offset, levels(codes.device), scale_levels(codes.device), out, count, BYTES=_BYTES, num_warps=4,
                enable_fp_fusion=False,  # level times scale, rounded, then added to the offset: as bitsandbytes and the reference have it
            )  # fmt: skip


@_dequantise.register_fake
def _(codes, scales, nested, offset, out):
    return None


def dequantise(weight: Weight, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """(N, K) of `dtype`, into `out` where it is given."""
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    if out.shape != weight.shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"nf4: out is {out.dtype} {tuple(out.shape)}, wanted a contiguous {dtype} {tuple(weight.shape)}"
        )
    if weight.codes.is_cuda or (launch.INTERPRETED and weight.codes.numel() <= 1 << 12):  # the interpreter is for tests
        _dequantise(weight.codes, weight.scales, weight.nested, weight.offset, out)
        return out
    return out.copy_(dequantise_reference(weight, dtype))


_buffers: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}


def shared_buffer(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of that shape that every caller on this stream shares: what it holds is good until the next call."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (dtype, device, stream)
    count = shape.numel()
    buffer = _buffers.get(key)
    if buffer is None or buffer.numel() < count:
        _buffers.pop(key, None)
        del buffer
        with torch.inference_mode(False):
            buffer = _buffers[key] = torch.empty(count, dtype=dtype, device=device)
    return buffer[:count].view(shape)


def release_buffers() -> None:
    """Give the shared memory back."""
    _buffers.clear()
