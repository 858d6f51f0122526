"""What an architecture does with packed rows and with its logits, found out by running a small copy of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft.config.model import ModelConfig
from rft.errors import Refused, RftError
from rft.models.attention import NAME, attention_kwargs, install_attention
from rft.models.backbone import find_base
from rft.models.documents import Documents, Needs
from rft.models.head import LogitTransform
from rft.models.shrink import build_small
from rft.models.source import ModelSource

# Three documents, each longer than the small copy's window and chunk
_LENGTHS = (13, 11, 18)
# Largest error of packed against separate, relative to the largest hidden state. fp32 gives 1e-6 on a CPU.
_ALLOWED = 1e-3


@dataclass(frozen=True)
class Probed:
    """What the small copy showed."""

    needs: Needs
    transform: LogitTransform
    isolates: bool
    """Whether packed documents give what they give alone."""
    error: float
    """Largest relative difference of packed and separate."""
    allowed: float
    control: float
    """The same with the documents run as one: what a leak looks like."""
    reason: str
    """Why not, where `isolates` is False."""
    attention: str
    """What `build_meta` is to be given: "rft", or "eager" for models that do not take attention from a registry."""
    router_logits: bool
    """Whether the base model hands out its routers' logits."""


@dataclass(frozen=True)
class _Row:
    """A packed row without labels."""

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    seq_idx: Tensor
    lengths: tuple[int, ...]
    pack_tokens: tuple[int, ...]
    max_length: int


def probe_architecture(source: ModelSource, cfg: ModelConfig, device: torch.device | str = "cpu") -> Probed:
    """Run a small random copy of the source's architecture in fp32 on `device`. Reads no weights.

    Raises Refused where the copy cannot be built, or its logits are neither its head's nor a scale or soft-cap of them.
    """
    return probe_config(source.config, device, trust_remote_code=cfg.trust_remote_code)


def probe_config(config: Any, device: torch.device | str = "cpu", *, trust_remote_code: bool = False) -> Probed:
    """`probe_architecture` from the config alone."""
    model = build_small(config, device, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        transform = find_transform(model)
        packed = _packed_against_separate(model)
        router = _gives_router_logits(model)
    reason = packed.reason
    if not reason and packed.error > _ALLOWED:
        reason = (
            f"documents in one row see each other: packed and separate differ by {packed.error:.2g} "
            f"(allowed {_ALLOWED:g}, without any border {packed.control:.2g})"
        )
    if not reason and packed.control < 10 * _ALLOWED:
        reason = f"the probe cannot tell: even without borders the documents differ by only {packed.control:.2g}"
    return Probed(
        packed.needs, transform, not reason, packed.error, _ALLOWED, packed.control, reason, packed.attention, router
    )


def require_packing(probed: Probed, *, packing: str, micro_batch: int, name: str = "this model") -> None:
    """Raise Refused where documents would share a row of a model that does not keep them apart."""
    if probed.isolates or (packing == "none" and micro_batch == 1):
        return
    do = 'set data.packing = "none" and train.micro_batch = 1'
    raise Refused(f'data.packing = "{packing}"', f"{name} cannot be packed here: {probed.reason}", do=do)


def _row(model: Any, lengths: tuple[int, ...], seed: int = 1) -> _Row:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    index = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[None]
    documents = Documents.from_lengths(lengths, device)
    moved = (t.to(device) for t in (ids, positions, index))
    ids, positions, index = moved
    return _Row(ids, positions, documents.cu_seqlens, index, lengths, lengths, max(lengths))


@dataclass
class _Packed:
    error: float
    control: float
    reason: str
    attention: str
    needs: Needs


# What a model raises that was handed something it cannot deal with
_RAISED = (ValueError, NotImplementedError, RuntimeError, TypeError, AttributeError, KeyError, IndexError)


def _packed_against_separate(model: Any) -> _Packed:
    """The oracle is stock eager attention, each document alone."""
    base, row = find_base(model), _row(model, _LENGTHS)
    dispatches = model.config._attn_implementation == NAME
    if dispatches:
        model.set_attn_implementation("eager")
    try:
        alone = [
            base(input_ids=ids, use_cache=False).last_hidden_state for ids in row.input_ids.split(list(_LENGTHS), dim=1)
        ]
    except _RAISED as raised:
        raise Refused(
            type(model).__name__, f"the stock model does not run on short documents: {_first_line(raised)}"
        ) from None
    separate = torch.cat(alone, dim=1)
    largest = separate.abs().max().clamp_min(1e-12)

    def error_of(documents: Documents, **kwargs: Any) -> float:
        with state.bound(documents):
            hidden = base(input_ids=row.input_ids, **kwargs).last_hidden_state
        difference = float((hidden - separate).abs().max() / largest)
        return difference if difference == difference else float("inf")

    state = install_attention(model, "math")
    whole = Documents.from_lengths((sum(_LENGTHS),), separate.device)
    if not dispatches:
        return _Packed(
            float("inf"), float("inf"), "its attention is not in transformers' attention registry", "eager", state.needs
        )
    model.set_attn_implementation(NAME)
    try:
        control = error_of(whole, position_ids=row.position_ids, use_cache=False)
    except (*_RAISED, RftError) as raised:
        reason = f"its attention does not take documents from outside: {_first_line(raised)}"
        return _Packed(float("inf"), float("inf"), reason, "eager", state.needs)
    state.needs.dropout = _dropout(model)
    try:
        return _Packed(error_of(Documents.of(row), **attention_kwargs(row)), control, "", NAME, state.needs)
    except RftError as refusal:
        return _Packed(float("inf"), control, refusal.problem, NAME, state.needs)
    except _RAISED as raised:
        leak = error_of(Documents.of(row), **attention_kwargs(row, isolate=False))
        reason = (
            f"documents in one row see each other: run all the same, packed and separate differ by {leak:.2g} "
            f"(allowed {_ALLOWED:g}). transformers: {_first_line(raised)}"
        )
        return _Packed(leak, control, reason, NAME, state.needs)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _dropout(model: Any) -> float:
    """Attention dropout that training mode would ask for."""
    config = model.config.get_text_config()
    return max(
        (
            float(getattr(config, n, 0) or 0)
            for n in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
        ),
        default=0.0,
    )


def _gives_router_logits(model: Any) -> bool:
    try:
        output = find_base(model)(input_ids=_row(model, (8,)).input_ids, use_cache=False, output_router_logits=True)
    except (TypeError, ValueError, KeyError, IndexError):
        return False
    logits = getattr(output, "router_logits", None)
    return isinstance(logits, tuple) and bool(logits) and all(isinstance(t, Tensor) for t in logits)


def find_transform(model: Any) -> LogitTransform:
    """The scale and soft-cap between a model's head and its logits, by comparing the two on random inputs.

    The head is scaled so that logits are large: a soft-cap on small ones cannot be told from a scale. Raises Refused
    where neither explains the difference.
    """
    base, head = find_base(model), model.get_output_embeddings()
    if head is None:
        raise Refused(type(model).__name__, "it has no output head", wanted="a causal language model")
    ids = _row(model, (24,)).input_ids
    try:
        raw, _ = _both(model, base, head, ids)
        head.weight.mul_(40.0 / raw.abs().max().clamp_min(1e-6))
        raw, logits = _both(model, base, head, ids)
    except _RAISED as raised:
        raise Refused(
            type(model).__name__, f"its head cannot be called on its hidden states: {_first_line(raised)}"
        ) from None
    numbers = [
        v
        for v in vars(model.config.get_text_config()).values()
        if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0
    ]
    for softcap in (None, *(n for n in numbers if n > 1)):
        if softcap is not None and logits.abs().max() > softcap:
            continue
        inside = logits if softcap is None else softcap * torch.atanh((logits / softcap).clamp(-0.999999, 0.999999))
        clear = inside.abs() < (float("inf") if softcap is None else 3 * softcap)  # beyond, tanh has no digits left
        scale = float((inside[clear] * raw[clear]).sum() / raw[clear].square().sum())
        found = LogitTransform(_as_in_config(scale, numbers), softcap)
        if (found(raw) - logits).abs().max() <= 2e-5 * logits.abs().max():
            return found
    raise Refused(
        type(model).__name__,
        "its logits are not its head's output, nor a scale or soft-cap of it",
        do="report the architecture",
    )


def _both(model: Any, base: Any, head: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    hidden = base(input_ids=ids, use_cache=False).last_hidden_state
    return head(hidden).float(), model(input_ids=ids, use_cache=False).logits.float()


def _as_in_config(scale: float, numbers: list[float]) -> float:
    """The number of the config (or its inverse) that the measured scale is, digits and all."""
    for exact in (1.0, *numbers, *(1 / n for n in numbers)):
        if abs(scale - exact) <= 1e-5 * abs(exact):
            return float(exact)
    return scale
