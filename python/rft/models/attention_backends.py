"""How attention inside documents is computed. Shapes: [1, H, T, E] queries, [1, Hkv, T, E] keys, [1, Hkv, T, Ev] values.

Every backend returns [1, H, T, Ev]; a token sees its own document up to itself, at most `window` tokens with itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from rft.models.documents import Documents

# Rows of a windowed document computed at a time: the band of keys they need is window + rows wide.
_BLOCK = 1024
# Scores of one document above which `math` computes them again in the backward: 2^26 in fp32 are 256 MiB.
_KEEP_SCORES = 1 << 26


@dataclass(frozen=True)
class Inputs:
    """One attention layer's tensors and what changes their scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None


def sdpa(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """`scaled_dot_product_attention`, a call a document. CPU and CUDA, any float type; no soft-cap, no sinks."""
    if inputs.softcap is not None or inputs.sinks is not None:
        raise ValueError("sdpa has neither soft-cap nor sinks")
    gqa = inputs.query.shape[1] != inputs.key.shape[1]
    outputs = []
    for query, key, value in _documents(inputs, documents):
        for start, stop, first in _blocks(query.shape[2], window):
            mask = None if window is None or stop <= window else _band(start, stop, first, window, query.device)
            whole = start == 0 and stop == query.shape[2]
            q, k, v = (
                (query, key, value)
                if whole
                else (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
            )
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=inputs.dropout,
                is_causal=mask is None,
                scale=inputs.scale,
                enable_gqa=gqa,
            )
            outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def math(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """Plain maths in fp32, a document at a time: serves soft-cap and sinks, and is the reference of the others."""
    outputs = []
    for query, key, value in _documents(inputs, documents):
        for start, stop, first in _blocks(query.shape[2], window):
            args = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
            mask = _band(start, stop, first, window, query.device)
            large = query.shape[1] * (stop - start) * (stop - first) > _KEEP_SCORES
            if large and torch.is_grad_enabled():
                outputs.append(checkpoint(_scores_and_sum, inputs, *args, mask, use_reentrant=False))
            else:
                outputs.append(_scores_and_sum(inputs, *args, mask))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def varlen(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """`torch.nn.attention.varlen`: one call for all documents. CUDA, bf16 or fp16, head sizes up to 256."""
    call, names = _varlen_call()
    size, value_size = inputs.query.shape[-1], inputs.value.shape[-1]
    width = max(size, value_size)  # one head size for all three: latent attention has smaller values
    query, key, value = (_rows(t, width) for t in (inputs.query, inputs.key, inputs.value))
    kwargs: dict = {"scale": inputs.scale} if "scale" in names else {}
    if "scale" not in names and inputs.scale != width**-0.5:
        query = query * (inputs.scale * width**0.5)
    if "window_size" in names:
        kwargs["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        kwargs["is_causal"] = True
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in names:
            kwargs["enable_gqa"] = True
        elif "window_size" not in names:
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    ends, longest = documents.cu_seqlens, documents.max_length
    out = call(query, key, value, ends, ends, longest, longest, **kwargs)
    return out[..., :value_size].transpose(0, 1)[None]


BACKENDS: dict[str, Callable[[Inputs, Documents, int | None], Tensor]] = {"varlen": varlen, "sdpa": sdpa, "math": math}


def dense(inputs: Inputs, mask: Tensor | None) -> Tensor:
    """Attention under a dense additive or boolean mask [B, 1, T, S], or causal without one: generation and stock calls."""
    if mask is not None:
        mask = mask[..., : inputs.key.shape[2]]
    elif inputs.query.shape[2] > 1:
        rows, keys = inputs.query.shape[2], inputs.key.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=inputs.query.device).tril(keys - rows)
    return _scores_and_sum(inputs, inputs.query, inputs.key, inputs.value, mask)


def _scores_and_sum(inputs: Inputs, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(cap(q k^T scale) + mask, sinks beside) v, in fp32. A boolean mask says what is seen."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = query.float() @ key.float().transpose(-1, -2) * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if inputs.sinks is not None:
        sinks = inputs.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if inputs.dropout:
        weights = F.dropout(weights, inputs.dropout)
    return (weights @ value.float()).to(value.dtype)


def _documents(inputs: Inputs, documents: Documents) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each document. `split`, not slices: its backward is one concatenation instead of a zero-filled row each."""
    lengths = list(documents.lengths)
    return zip(*(t.split(lengths, dim=2) for t in (inputs.query, inputs.key, inputs.value)), strict=True)


def _blocks(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, first key) of the blocks in which a document is computed: one, unless a window makes it a band."""
    step = length if window is None or length <= window else max(window, _BLOCK)
    for start in range(0, length, step):
        yield start, min(start + step, length), 0 if window is None else max(0, start - window + 1)


def _band(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """[rows, keys] what rows start..stop see of the keys first..stop."""
    behind = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _rows(tensor: Tensor, width: int) -> Tensor:
    """[1, H, T, E] -> [T, H, width]."""
    rows = tensor.squeeze(0).transpose(0, 1)  # not [0]: the gradient of a selection is a filled tensor and a copy
    return rows if rows.shape[-1] == width else F.pad(rows, (0, width - rows.shape[-1]))


@cache
def _varlen_call() -> tuple[Callable, frozenset[str]]:
    """The function and the names of its parameters, which differ: is_causal in 2.10, window_size from 2.11, enable_gqa from 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def varlen_has_windows() -> bool:
    return "window_size" in _varlen_call()[1]
