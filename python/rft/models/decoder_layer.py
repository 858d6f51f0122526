"""The decoder layer around attention and MLP: the addition to the residual stream and the norm behind it are one kernel.

T tokens, D hidden. A layer is served where it is h + attention(norm(h)), then h + mlp(norm(h)), with or without a norm behind each part. Which norm
stands where is found by comparing; attention and MLP are stand-ins there, so that nothing large is computed and what the layer hands to its attention is
seen. Norms hand on their result quantised where the linears behind hold FP8. Our class is a subclass of the layer's own, so that
checkpointing, sharding and recording find it as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft.kernels import fp8
from rft.kernels.rms_norm import add_rms_norm, add_rms_norm_fp8, rms_norm_beside
from rft.models.attention_block import AttentionBlock
from rft.models.linear import as_class, child, holds_fp8, hooked
from rft.models.matching import Candidate, Matcher
from rft.models.mlp import FusedGatedMLP, GatedMLP
from rft.models.norm import RMSNorm


@dataclass(frozen=True)
class Plan:
    """Names of a layer's parts. after_*: norms of what attention and the MLP give, or None."""

    attention: str
    mlp: str
    before_attention: str
    before_mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None

    def describe(self) -> str:
        after = (
            "" if self.after_attention is None else f", {self.after_attention} and {self.after_mlp} behind the parts"
        )
        return f"addition and {self.before_mlp} in one pass{after}"


class _Normed(NamedTuple):
    """(1, T, D) and the same as FP8 rows (T, D) where the reader takes them."""

    y: Tensor
    rows: fp8.Rows | None


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    plan: Plan = self.rft_plan
    if args:
        kwargs.update(zip(names_behind_first(type(self).rft_original), args, strict=False))
    attention, mlp = child(self, plan.attention), child(self, plan.mlp)
    first, hidden_states = _norm(child(self, plan.before_attention), hidden_states, attention)
    if first.rows is not None:
        kwargs["quantised"] = first.rows
    out, _ = attention(hidden_states=first.y, **kwargs)
    if plan.after_attention is not None:
        out = child(self, plan.after_attention)(out)
    second, hidden = _add_norm(child(self, plan.before_mlp), out, hidden_states, mlp)
    out = mlp(second.y) if second.rows is None else mlp(second.y, quantised=second.rows)
    if plan.after_mlp is not None:
        out = child(self, plan.after_mlp)(out)
    return hidden + out


def takes_rows(part: nn.Module) -> bool:
    """Whether an attention block or MLP of ours reads its input through FP8 weights, by its own forward (tiled MLPs have another)."""
    if not isinstance(part, (AttentionBlock, GatedMLP, FusedGatedMLP)) or "forward" in part.__dict__:
        return False
    return any(holds_fp8(m) for m in part.rft_readers)


def readers_of_one_input(layer: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The linears of a layer that our blocks call with one input: q, k and v; gate and up."""
    return [m.rft_readers for m in layer.modules() if isinstance(m, (AttentionBlock, GatedMLP, FusedGatedMLP))]


def count_handed_rows(layers: Sequence[nn.Module]) -> tuple[int, int]:
    """(attention blocks and MLPs with FP8 weights that get their input quantised by the norm before, all that have such weights)."""
    handed = total = 0
    for layer in layers:
        readers = [m for m in layer.modules() if takes_rows(m)]
        total += len(readers)
        plan: Plan | None = getattr(layer, "rft_plan", None) if hasattr(type(layer), "rft_original") else None
        if plan is not None:
            parts = [(plan.before_attention, plan.attention), (plan.before_mlp, plan.mlp)]
            handed += sum(
                layer.get_submodule(part) in readers and not hooked(layer.get_submodule(n)) for n, part in parts
            )
    return handed, total


def _norm(norm: Any, x: Tensor, reader: nn.Module) -> tuple[_Normed, Tensor]:
    """(norm(x), x as the residual stream goes on with it)"""
    if not norm.through_kernel(x) or hooked(norm):
        return _Normed(norm(x), None), x
    y, x, rows = rms_norm_beside(x, norm.weight, norm.eps, quantise=takes_rows(reader), **norm.kernel_options)
    return _Normed(y, rows), x


def _add_norm(norm: Any, x: Tensor, residual: Tensor, reader: nn.Module) -> tuple[_Normed, Tensor]:
    """(norm(x + residual), x + residual)"""
    if not norm.through_kernel(x) or x.dtype != residual.dtype or hooked(norm):
        total = residual + x
        return _Normed(norm(total), None), total
    given = (x, residual, norm.weight, norm.eps)
    if takes_rows(reader):
        y, total, rows = add_rms_norm_fp8(*given, **norm.kernel_options)
        return _Normed(y, rows), total
    y, total = add_rms_norm(*given, **norm.kernel_options)
    return _Normed(y, None), total


@cache
def names_behind_first(kind: Any) -> tuple[str, ...]:
    """Names of the parameters of a layer's own forward behind self and the hidden states."""
    return tuple(inspect.signature(kind.forward).parameters)[2:]


@cache
def _fused_class(kind: Any) -> type:
    """A subclass with our forward; `transformers` puts its checkpointing around it as around the original's."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _forward(self, hidden_states, *args, **kwargs)

    members = {"forward": forward, "rft_original": kind, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


# ---- finding


def _looks_like_attention(module: nn.Module) -> bool:
    return isinstance(module, AttentionBlock) or "position_embeddings" in inspect.signature(module.forward).parameters


def _looks_like_layer(module: nn.Module) -> bool:
    """An attention as a child of its own, and others beside it."""
    if hasattr(type(module), "rft_original") or isinstance(module, (nn.ModuleList, AttentionBlock)):
        return False
    children = list(module.children())
    return len(children) > 2 and sum(map(_looks_like_attention, children)) == 1


def _candidates(module: nn.Module) -> list[Candidate] | str:
    children = dict(module.named_children())
    norms = [n for n, m in children.items() if isinstance(m, RMSNorm)]
    (attention,) = (n for n, m in children.items() if _looks_like_attention(m))
    idle = [n for n, m in children.items() if type(m) is nn.Dropout and not m.p]
    rest = [n for n in children if n not in (*norms, *idle, attention)]
    if len(rest) != 1:
        return f"it has {len(rest)} parts beside attention and RMSNorms: {', '.join(rest)}" if rest else "it has no MLP"
    if not all(children[n].kernel for n in norms):
        return "its norms do not run through the kernel"
    if len(norms) not in (2, 4):
        return f"it has {len(norms)} RMSNorms"
    plans = [
        Plan(attention, rest[0], names[0], names[-1])
        if len(names) == 2
        else Plan(attention, rest[0], names[0], names[2], names[1], names[3])
        for names in permutations(norms)
    ]
    return [Candidate(plan.describe(), _building(plan)) for plan in plans]


def _building(plan: Plan):
    def build(original: nn.Module) -> nn.Module:
        kind: Any = type(original)
        made = as_class(original, _fused_class(kind))
        made.__dict__["rft_plan"] = plan
        return made

    return build


class _StandIn(nn.Module):
    """For attention or an MLP: a function of its input without weights, which keeps the names of what else it was given."""

    def __init__(self, is_attention: bool):
        super().__init__()
        self.is_attention = is_attention
        self.given: list[str] = []

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> Tensor | tuple[Tensor, None]:
        kwargs["position_embeddings"] = position_embeddings
        self.given = sorted(f"{k} = {v!r}" for k, v in kwargs.items() if v is not None)
        mixed = hidden_states.roll(1, -1)
        if self.is_attention:
            return torch.sin(hidden_states) + 0.5 * mixed, None
        return torch.tanh(hidden_states) * mixed


def _with_stand_ins(module: nn.Module) -> None:
    for name, part in list(module.named_children()):
        if not isinstance(part, (RMSNorm, nn.Dropout)):
            module._modules[name] = _StandIn(_looks_like_attention(part))


def _inputs(module: nn.Module, generator: torch.Generator) -> tuple[Tensor, ...]:
    width = next(m for m in module.children() if isinstance(m, RMSNorm)).weight.shape[0]
    return (torch.randn(1, 11, width, generator=generator) + 0.3,)


_GIVEN = {
    "attention_mask": "mask",
    "position_ids": "positions",
    "position_embeddings": ("cos", "sin"),
    "use_cache": False,
}
"""What a model hands to its layers; a stand-in only has to see that it arrives."""


def _call(part: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, Any]:
    (x,) = tensors
    out = part(x, **_GIVEN)
    if not isinstance(out, Tensor):
        raise TypeError(f"the layer gives a {type(out).__name__}")
    return out, [m.given for m in part.modules() if isinstance(m, _StandIn)]


DECODER_LAYER = Matcher(
    "add and norm",
    _looks_like_layer,
    _candidates,
    _inputs,
    call=_call,
    rounding="no worse",
    prepare=_with_stand_ins,
)
