"""Attention of packed documents through what is fastest on newer GPUs: FA4, cuDNN for long documents, FlexAttention for soft-cap and sinks.

Shapes and meaning as in attention_backends.py. Everything that these need to know of a batch (borders, block masks, which documents are long) is made
once a batch and kept on its `Documents`, not once a layer. Each is proved on the device before `auto` takes it: see `proof`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rft.closeness import relative_error
from rft.models.attention_backends import Inputs, math, varlen
from rft.models.documents import Documents

if TYPE_CHECKING:
    from rft.models.documents import Needs

LONG = 4096
"""Tokens from which a document of its own call is faster through cuDNN than within varlen's: 541 TFLOP/s against 318 at 16,384, 498 of FA4 against 262
of varlen at documents of 7,500 (H200, kernels.md); not measured in between."""
WHOLE = 256
"""cuDNN makes a plan for every length that it meets: only lengths that are multiples of this are given to it, as pieces of split documents and whole rows are."""
FLEX_BLOCK = 128
FLEX_TOKENS = 1024
"""Rows are filled up to a multiple of this, so that few shapes are compiled."""


def fa4(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """`flash_attn.cute`: one call for all documents. Hopper and newer, bf16 or fp16; windows, soft-cap and sinks."""
    call, names = _fa4_call()
    # squeeze, not [0]: the gradient of a selection is a filled tensor and a copy
    query, key, value = (t.squeeze(0).transpose(0, 1) for t in (inputs.query, inputs.key, inputs.value))
    ends, longest = documents.cu_seqlens, documents.max_length
    kwargs: dict[str, Any] = {
        "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "softmax_scale": inputs.scale, "causal": True,
    }  # fmt: skip
    if window is not None:
        kwargs["window_size"] = (window - 1, 0)
    if inputs.softcap is not None:
        kwargs["softcap"] = inputs.softcap
    if inputs.sinks is not None:
        kwargs["learnable_sink"] = inputs.sinks.to(query.dtype)
    if "deterministic" in names:
        kwargs["deterministic"] = torch.are_deterministic_algorithms_enabled()
    out = call(query, key, value, **{k: v for k, v in kwargs.items() if k in names or k in ("softmax_scale", "causal")})
    out = out[0] if isinstance(out, tuple) else out
    return out.transpose(0, 1)[None]


@cache
def _fa4_call() -> tuple[Callable, frozenset[str]]:
    """The function and the names of its parameters, which change between its betas."""
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func, frozenset(inspect.signature(flash_attn_varlen_func).parameters)


def cudnn(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """Long documents each through cuDNN's dense attention, the others in one varlen call. Windowed layers and deterministic runs: varlen alone."""
    runs = _runs_of(documents) if window is None and not torch.are_deterministic_algorithms_enabled() else None
    if not runs:
        return varlen(inputs, documents, window)
    gqa = inputs.query.shape[1] != inputs.key.shape[1]
    parts: list[Tensor] = []
    for start, stop, rest in runs:
        q, k, v = (t[:, :, start:stop] for t in (inputs.query, inputs.key, inputs.value))
        if rest is None:
            parts.append(_dense_cudnn(q, k, v, inputs.scale, gqa))
        else:
            parts.append(varlen(Inputs(q, k, v, inputs.scale), rest, None))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _dense_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, gqa: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)


def _is_dense(length: int) -> bool:
    return length >= LONG and length % WHOLE == 0


def _runs_of(documents: Documents) -> list[tuple[int, int, Documents | None]]:
    """(first token, end, None) of each long document, (first token, end, its documents) of each run of others; none where no document is
    long. Made once a batch."""
    kept = documents.made
    if "runs" not in kept and not any(map(_is_dense, documents.lengths)):
        kept["runs"] = []
    if "runs" not in kept:
        runs: list[tuple[int, int, Documents | None]] = []
        at, begun, short = 0, 0, []
        for length in (*documents.lengths, None):
            if length is not None and not _is_dense(length):
                short.append(length)
                at += length
                continue
            if short:
                runs.append((begun, at, type(documents).from_lengths(tuple(short), documents.cu_seqlens.device)))
            if length is not None:
                runs.append((at, at + length, None))
                at += length
            begun, short = at, []
        kept["runs"] = runs
    return kept["runs"]


def flex(inputs: Inputs, documents: Documents, window: int | None) -> Tensor:
    """FlexAttention under a block mask of the documents: soft-cap, sinks, windows, any head size. Compiled once a shape."""
    tokens = inputs.query.shape[2]
    fill = -tokens % FLEX_TOKENS
    query, key, value = (F.pad(t, (0, 0, 0, fill)) if fill else t for t in (inputs.query, inputs.key, inputs.value))
    kwargs: dict[str, Any] = {
        "block_mask": _block_mask(documents, window, tokens + fill), "scale": inputs.scale, "enable_gqa": query.shape[1] != key.shape[1],
    }  # fmt: skip
    if inputs.softcap is not None:
        cap = inputs.softcap
        kwargs["score_mod"] = _capped(cap)
    if inputs.sinks is None:
        out = _flex_call()(query, key, value, **kwargs)
        return out[:, :, :tokens]
    out, lse = _with_lse(query, key, value, kwargs)
    # one more logit in the denominator: exp(lse) / (exp(lse) + exp(sink))
    share = torch.sigmoid(lse.float() - inputs.sinks.float().view(1, -1, 1))[..., None]
    return (out * share).to(out.dtype)[:, :, :tokens]


@cache
def _capped(cap: float) -> Callable:
    """One function for each cap: a new one would be compiled again."""

    def score_mod(score, batch, head, q, k):
        return cap * torch.tanh(score / cap)

    return score_mod


def _with_lse(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    from torch.nn.attention import flex_attention as module

    if hasattr(module, "AuxRequest"):
        out, more = _flex_call()(query, key, value, return_aux=module.AuxRequest(lse=True), **kwargs)
        return out, more.lse
    return _flex_call()(query, key, value, return_lse=True, **kwargs)


@cache
def _flex_call() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _block_mask(documents: Documents, window: int | None, tokens: int) -> Any:
    """From the lengths, which the host knows; made once a batch and window."""
    from torch.nn.attention.flex_attention import BlockMask

    key = ("block mask", window, tokens)
    if key not in documents.made:
        device = documents.cu_seqlens.device
        lengths = [*documents.lengths, *([tokens - sum(documents.lengths)] if tokens > sum(documents.lengths) else [])]
        starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        partial, full = visible_blocks(starts, window)
        first = _moved(torch.from_numpy(starts.astype(np.int32)), device)

        def mask_mod(batch, head, q, k):
            seen = (k <= q) & (k >= first[q])
            return seen if window is None else seen & (q - k < window)

        documents.made[key] = BlockMask.from_kv_blocks(
            *_as_blocks(partial, device),
            *_as_blocks(full, device),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(tokens, tokens),
        )
    return documents.made[key]


def visible_blocks(starts: np.ndarray, window: int | None, block: int = FLEX_BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """(blocks of which a part is seen, blocks seen whole), bool [query blocks, key blocks]. starts: first token of each token's document."""
    tokens = len(starts)
    number = -(-tokens // block)
    first = np.arange(number) * block
    last = np.minimum(first + block, tokens) - 1
    earliest = starts[first] if window is None else np.maximum(starts[first], first - window + 1)
    some = (first[None, :] <= last[:, None]) & (last[None, :] >= earliest[:, None])
    whole = (last[None, :] <= first[:, None]) & (first[None, :] >= starts[last][:, None])
    if window is not None:
        whole &= last[:, None] - first[None, :] < window
    whole &= (last - first + 1 == block)[None, :] & (last - first + 1 == block)[:, None]
    return some & ~whole, whole


def _as_blocks(table: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """(how many in each row, which, filled up with the others), int32 with dims of batch and head before them."""
    counts = torch.from_numpy(table.sum(1).astype(np.int32))
    order = torch.from_numpy(np.argsort(~table, axis=1, kind="stable").astype(np.int32))
    return _moved(counts, device)[None, None], _moved(order, device)[None, None]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without the host waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# ---- what can serve


def why_not(name: str, device: torch.device, dtype: torch.dtype, needs: Needs) -> str | None:
    """Why `name` (fa4, cudnn, flex) cannot serve, as far as can be said without running it."""
    if device.type != "cuda":
        return f"{name} needs CUDA"
    if not torch.cuda.is_available():
        return f"{name} needs a GPU, and torch finds none"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{name} has no {str(dtype).removeprefix('torch.')}"
    if needs.dropout:
        return f"{name} has no attention dropout, which this model's config sets to {needs.dropout}"
    size = max(needs.head_size, needs.value_size)
    if name == "fa4":
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "flash_attn.cute is not installed (pip install 'rft-llm[fa4]')"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "fa4 needs Hopper or newer"
        if needs.head_size != needs.value_size or size > 128 or size % 8:
            return f"fa4 takes head sizes up to 128 in multiples of 8, the same for values; this model has {needs.head_size} and {needs.value_size}"
        return None
    if name == "cudnn":
        if needs.softcap or needs.sinks:
            return f"cudnn has no {'soft-cap' if needs.softcap else 'sinks'}, which this model uses"
        if torch.cuda.get_device_capability(device) < (9, 0):
            return "cudnn is faster from Hopper on"
        if needs.head_size != needs.value_size or size > 128 or size % 8:
            return f"cudnn takes head sizes up to 128 in multiples of 8, the same for values; this model has {needs.head_size} and {needs.value_size}"
        return None
    if needs.head_size != needs.value_size and needs.sinks:
        return "flex with sinks takes values as wide as keys"
    return None


ALLOWED = 2e-2
"""Norm of the error over the norm, of output and gradients in bf16 against plain maths in fp32; rounding alone is 4e-3."""


@cache
def proof(
    name: str, device: torch.device, dtype: torch.dtype, needs: tuple[bool, bool, bool, int, int]
) -> tuple[float, str | None]:
    """(largest relative error, why it may not serve or None) of a backend on this device, on packed documents of random numbers with what
    the model needs (soft-cap, sinks, window, head sizes): output and every gradient against plain maths."""
    softcap, sinks, window, size, value_size = needs
    lengths = (200, 1, 131, 52) if name != "cudnn" else (60, LONG, 4)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, size), (2, size), (2, value_size))
    tensors = [torch.randn(1, h, sum(lengths), e, generator=generator).to(device, dtype) for h, e in shapes]
    sink = torch.randn(4, generator=generator).to(device, dtype) if sinks else None
    runs = []
    for call, kind in ((math, torch.float32), (BACKENDS[name], dtype)):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (*tensors, *([] if sink is None else [sink]))]
        q, k, v, *rest = leaves
        given = Inputs(q, k, v, size**-0.5, 0.0, 20.0 if softcap else None, rest[0] if rest else None)
        try:
            with torch.enable_grad():
                out = call(given, Documents.from_lengths(lengths, device), 48 if window else None)
                slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
                out.backward(slope)
        except Exception as raised:  # a library of another version can raise anything: then it does not serve
            return float(
                "inf"
            ), f"{name} fails on this machine: {type(raised).__name__}: {str(raised).strip().splitlines()[:1]}"
        runs.append([out.detach().float(), *(t.grad.float() if t.grad is not None else None for t in leaves)])
    worst = 0.0
    for truth, own in zip(*runs, strict=True):
        if truth is None or own is None:
            return float("inf"), f"{name} gives no gradient where plain maths does"
        worst = max(worst, relative_error(own, truth))
    return worst, None if worst <= ALLOWED else f"{name} differs from plain maths by {worst:.1e} (allowed {ALLOWED:g})"


BACKENDS: dict[str, Callable[[Inputs, Documents, int | None], Tensor]] = {"fa4": fa4, "cudnn": cudnn, "flex": flex}
