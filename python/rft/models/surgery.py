"""Verified swap: find modules by structure, compare ours with the original, replace on the instance only where they agree.

The comparison runs on a materialised copy of each distinct module with that module's own attributes, so it works while
the model is on meta: forward and gradients, in fp32, in bf16, and in bf16 with an fp32 weight plain and under autocast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft.models.receipts import Receipts

# Norm of the error over the norm of the original. In bf16 the same casting gives at most a few flipped roundings
# (under 2e-4 measured); another casting moves every element by half a step (1.7e-3).
_ALLOWED_FORWARD = {torch.float32: 1e-5, torch.bfloat16: 5e-4}
# Gradients may be rounded at other places than the original's
_ALLOWED_GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Candidate:
    """One module that may equal the original."""

    how: str
    build: Callable[[nn.Module], nn.Module]
    """Original -> ours, sharing its parameters under the same names."""


@dataclass(frozen=True)
class Matcher:
    """One kind of part: what it looks like, what could replace it, and inputs to compare on."""

    what: str
    matches: Callable[[nn.Module], bool]
    candidates: Callable[[nn.Module], list[Candidate]]
    inputs: Callable[[nn.Module, torch.Generator], tuple[Any, ...]]


@dataclass
class _Verdict:
    candidate: Candidate | None
    checked: dict[str, float]
    why: str = ""


def default_matchers() -> list[Matcher]:
    """Every part that rft has a replacement for."""
    from rft.models.norm import RMS_NORM

    return [RMS_NORM]


def apply_swaps(
    model: nn.Module, receipts: Receipts, *, device: torch.device | str = "cpu", matchers: list[Matcher] | None = None
) -> nn.Module:
    """Swap what can be shown to be equal on `device`, write receipts, and return the model. Parameter names stay."""
    for matcher in matchers if matchers is not None else default_matchers():
        receipts.ask(matcher.what)
        _swap(model, matcher, receipts, torch.device(device))
    return model


def _swap(model: nn.Module, matcher: Matcher, receipts: Receipts, device: torch.device) -> None:
    found = [(name, m) for name, m in model.named_modules() if matcher.matches(m)]
    verdicts: dict[tuple, _Verdict] = {}
    done: dict[str, tuple[int, dict[str, float]]] = {}
    declined: dict[str, int] = {}
    for name, module in found:
        if ".original_module" in name or ".modules_to_save." in name:
            why = "PEFT keeps a frozen and a trained copy of it"
            declined[why] = declined.get(why, 0) + 1
            continue
        key = _signature(module)
        if key not in verdicts:
            verdicts[key] = _verify(module, matcher, device)
        verdict = verdicts[key]
        if verdict.candidate is None:
            why = f"{type(module).__name__}: {verdict.why}"
            declined[why] = declined.get(why, 0) + 1
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, verdict.candidate.build(module).train(module.training))
        count, checked = done.get(verdict.candidate.how, (0, {}))
        merged = {k: max(v, checked.get(k, 0.0)) for k, v in verdict.checked.items()}
        done[verdict.candidate.how] = (count + 1, merged)
    for how, (count, checked) in done.items():
        receipts.apply(matcher.what, count, len(found), how, checked)
    for why, count in declined.items():
        receipts.decline(matcher.what, count, why)
    if not found:
        receipts.decline(matcher.what, 0, "the model has no such part")


def _signature(module: nn.Module) -> tuple:
    """Modules with equal signatures compute the same function of their weights."""
    plain = {
        k: repr(v)
        for k, v in vars(module).items()
        if not k.startswith("_") and isinstance(v, (int, float, str, bool, tuple, type(None)))
    }
    plain.pop("training", None)
    plain.pop("layer_idx", None)
    shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    return type(module), shapes, tuple(sorted(plain.items()))


def _verify(module: nn.Module, matcher: Matcher, device: torch.device) -> _Verdict:
    """The first candidate that agrees in every check, with its errors; else the nearest one's failure."""
    problems: list[tuple[float, str]] = []
    for candidate in matcher.candidates(module):
        checked: dict[str, float] = {}
        worst, why = 0.0, ""
        for label, kind, weight_kind, autocast in _checks(device):
            errors = _compare(module, candidate, matcher, device, kind, weight_kind, autocast)
            for part, error in errors.items():
                checked[f"{label} {part}"] = error
                allowed = (_ALLOWED_FORWARD if part == "forward" else _ALLOWED_GRADIENT)[kind]
                if not error <= allowed and (error / allowed > worst or error != error):
                    worst, why = error / allowed, f"{label} {part} differs by {error:.1e} (allowed {allowed:.0e})"
        if not why:
            return _Verdict(candidate, checked)
        problems.append((worst, why))
    return _Verdict(None, {}, min(problems)[1] if problems else "nothing to replace it with")


def _checks(device: torch.device) -> list[tuple[str, torch.dtype, torch.dtype, bool]]:
    """(label, type of the input, type of the weights, under autocast)."""
    half = torch.bfloat16
    return [
        ("fp32", torch.float32, torch.float32, False),
        ("bf16", half, half, False),
        ("bf16, fp32 weight", half, torch.float32, False),
        ("bf16, fp32 weight, autocast", half, torch.float32, True),
    ]


def _compare(
    module: nn.Module,
    candidate: Candidate,
    matcher: Matcher,
    device: torch.device,
    kind: torch.dtype,
    weight_kind: torch.dtype,
    autocast: bool,
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    original = copy.deepcopy(module).to_empty(device=device).to(weight_kind)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.5)
    original.requires_grad_(True)
    ours = candidate.build(copy.deepcopy(original))
    inputs = [t.to(device, kind) for t in matcher.inputs(module, generator)]
    runs = []
    for part in (original, ours):
        arguments = [t.clone().requires_grad_(True) for t in inputs]
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            output = part(*arguments)
        slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        output.backward(slope)
        weights = dict(part.named_parameters())
        runs.append((output.detach(), [t.grad for t in arguments], [weights[n].grad for n in sorted(weights)]))
    (out, out_inputs, out_weights), (own, own_inputs, own_weights) = runs
    if own.dtype != out.dtype or own.shape != out.shape:
        return {"forward": float("inf")}
    return {
        "forward": _relative(own, out),
        "input gradient": max((_relative(a, b) for a, b in zip(own_inputs, out_inputs, strict=True)), default=0.0),
        "weight gradient": max((_relative(a, b) for a, b in zip(own_weights, out_weights, strict=True)), default=0.0),
    }


def _relative(own: Tensor | None, original: Tensor | None) -> float:
    if own is None or original is None:
        return 0.0 if own is original else float("inf")
    return float((own.float() - original.float()).norm() / original.float().norm().clamp_min(1e-12))
