"""Verified swap: find modules by structure, compare ours with the original, replace on the instance only where they agree.

The comparison runs on a materialised copy of each distinct module with that module's own attributes, so it works while
the model is on meta: forward and gradients, in fp32, in bf16, and for norms in bf16 with an fp32 weight plain and under autocast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft.closeness import relative_error
from rft.models.matching import Candidate, Matcher
from rft.models.receipts import Receipts

# Norm of the error over the norm of the original. In bf16 the same casting gives at most a few flipped roundings
# (under 2e-4 measured); another casting moves every element by half a step (1.7e-3).
_ALLOWED_FORWARD = {torch.float32: 1e-5, torch.bfloat16: 5e-4}
# Gradients may be rounded at other places than the original's
_ALLOWED_GRADIENT = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
# Where products are summed in another order: in bf16, error against the original in fp32 over the original's own error
ALLOWED_RATIO = 1.5
RATIO = "times as wrong: "
"""Begins the name of such a check in receipts."""


@dataclass
class _Verdict:
    candidate: Candidate | None
    checked: dict[str, float]
    why: str = ""


def default_matchers(model: Any, device: torch.device, *, kernels: bool = False) -> list[Matcher]:
    """Every part that rft has a replacement for. kernels: with the Triton kernels; False: plain torch."""
    from rft.models.norm import rms_norm_matcher

    if not kernels:
        return [rms_norm_matcher(kernels=False)]
    from rft.models.attention_block import attention_matcher
    from rft.models.decoder_layer import DECODER_LAYER
    from rft.models.linear import LORA_LINEAR
    from rft.models.mlp import GATED_MLP

    # the layer last: it looks at what its children have become
    return [rms_norm_matcher(kernels=True), LORA_LINEAR, GATED_MLP, attention_matcher(model, device), DECODER_LAYER]


def why_no_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run here, or None."""
    if device.type != "cuda":
        return f"they need CUDA, this is a {device.type}"
    try:
        import rft.kernels.launch  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "they need compute capability 8.0 (Ampere) or newer"
    return None


def apply_swaps(
    model: nn.Module,
    receipts: Receipts,
    *,
    device: torch.device | str = "cpu",
    matchers: list[Matcher] | None = None,
    kernels: bool = False,
) -> nn.Module:
    """Swap what can be shown to be equal on `device`, write receipts, and return the model. Parameter names stay."""
    device = torch.device(device)
    for matcher in matchers if matchers is not None else default_matchers(model, device, kernels=kernels):
        receipts.ask(matcher.what)
        _swap(model, matcher, receipts, device)
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
        key = (*_signature(module), matcher.key(module))
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
    parts = tuple((n, type(m), _plain_attributes(m)) for n, m in module.named_modules())
    shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters())
    return parts, shapes


def _plain_attributes(module: nn.Module) -> tuple:
    plain = {
        k: repr(v)
        for k, v in vars(module).items()
        if not k.startswith("_") and isinstance(v, (int, float, str, bool, tuple, type(None)))
    }
    plain.pop("training", None)
    plain.pop("layer_idx", None)
    return tuple(sorted(plain.items()))


def _verify(module: nn.Module, matcher: Matcher, device: torch.device) -> _Verdict:
    """The first candidate that agrees in every check, with its errors; else the nearest one's failure."""
    candidates = matcher.candidates(module)
    if isinstance(candidates, str):
        return _Verdict(None, {}, candidates)
    original = _Original(module, matcher, device)
    problems: list[tuple[float, str]] = []
    for candidate in candidates:
        checked: dict[str, float] = {}
        worst, why = 0.0, ""
        for label, kind, weight_kind, autocast in _checks(device, matcher):
            try:
                errors = original.compare(candidate, kind, weight_kind, autocast)
            except _CANNOT_RUN as raised:
                worst, why = float("inf"), f"{label} cannot be compared: {_first_line(raised)}"
                break
            ratio = matcher.rounding == "no worse" and kind != torch.float32
            for part, error in errors.items():
                checked[f"{RATIO if ratio else ''}{label} {part}"] = error
                allowed = (_ALLOWED_FORWARD if part == "forward" else _ALLOWED_GRADIENT)[kind]
                allowed = ALLOWED_RATIO if ratio else allowed
                if not error <= allowed and (error / allowed > worst or error != error):
                    how = f"is {error:.1f} times as wrong as the original" if ratio else f"differs by {error:.1e}"
                    worst, why = error / allowed, f"{label} {part} {how} (allowed {allowed:.1g})"
            if why:
                break
        if not why:
            return _Verdict(candidate, checked)
        problems.append((worst, why))
    return _Verdict(None, {}, min(problems)[1] if problems else "nothing to replace it with")


# What modules raise for inputs of another kind than they expect: then there is nothing to compare, and nothing is swapped.
_CANNOT_RUN = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, NotImplementedError)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def _checks(device: torch.device, matcher: Matcher) -> list[tuple[str, torch.dtype, torch.dtype, bool]]:
    """(label, type of the input, type of the weights, under autocast)."""
    half = torch.bfloat16
    plain = [("fp32", torch.float32, torch.float32, False), ("bf16", half, half, False)]
    if interpreted(device) and matcher.kernels:
        return plain[:1]
    if matcher.rounding == "no worse":
        return plain
    return [
        *plain,
        ("bf16, fp32 weight", half, torch.float32, False),
        ("bf16, fp32 weight, autocast", half, torch.float32, True),
    ]


def interpreted(device: torch.device) -> bool:
    """Whether kernels run in Triton's interpreter, whose bf16 stores round toward zero: fp32 is all it can prove."""
    return device.type == "cpu"


def _materialised(module: nn.Module, matcher: Matcher, device: torch.device) -> nn.Module:
    """A copy with random fp32 weights that keep activations near one, and norms off one and zero."""
    flags = {n: p.requires_grad for n, p in module.named_parameters()}
    made = copy.deepcopy(module)
    if matcher.prepare is not None:
        matcher.prepare(made)
    made = made.to_empty(device=device).float()
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else noise * 0.3 + 0.5)
            parameter.requires_grad_(matcher.train_all or flags[name])
    return made


_ROUNDINGS = 1 << 14, 512
"""Elements of the input, and of the smallest parameter's gradient, over which the ratio of two rounding errors is taken in bf16: with a few
hundred, luck alone makes one 1.5 times the other. Small modules are run on several inputs (at most 16)."""


class _Original:
    """What one module computes on random inputs, in each kind of check: run once, however many candidates are compared with it."""

    def __init__(self, module: nn.Module, matcher: Matcher, device: torch.device):
        self._module, self._matcher, self._device = module, matcher, device
        self._runs: dict[tuple, tuple[list[list[Tensor]], _Run, _Run | None]] = {}

    def compare(
        self, candidate: Candidate, kind: torch.dtype, weight_kind: torch.dtype, autocast: bool
    ) -> dict[str, float]:
        """Errors of a candidate by part."""
        matcher, key = self._matcher, (kind, weight_kind, autocast)
        exact = _materialised(self._module, matcher, self._device)
        if key not in self._runs:
            self._runs[key] = self._run(exact, *key)
        draws, theirs, truth = self._runs[key]
        own = _run(candidate.build(exact.to(weight_kind)), draws, matcher, autocast)
        if (
            own.output.dtype != theirs.output.dtype
            or own.output.shape != theirs.output.shape
            or own.more != theirs.more
        ):
            return {"forward": float("inf")}
        return _differences(own, theirs, _relative if truth is None else _times_as_wrong, truth)

    def _run(
        self, exact: nn.Module, kind: torch.dtype, weight_kind: torch.dtype, autocast: bool
    ) -> tuple[list[list[Tensor]], _Run, _Run | None]:
        """(inputs, the original's run, and that in fp32 where it is the yardstick)."""
        matcher = self._matcher
        yardstick = matcher.rounding == "no worse" and kind != torch.float32

        def draw(number: int) -> list[Tensor]:
            inputs = matcher.inputs(self._module, torch.Generator().manual_seed(number))
            return [t.to(self._device, kind) for t in inputs]

        first = draw(0)
        smallest = min((p.numel() for p in exact.parameters() if p.requires_grad), default=_ROUNDINGS[1])
        wanted = (
            max(_ROUNDINGS[0] // max(first[0].numel(), 1), _ROUNDINGS[1] // max(smallest, 1), 1) if yardstick else 1
        )
        draws = [first, *(draw(number) for number in range(1, min(wanted, 16)))]
        theirs = _run(copy.deepcopy(exact).to(weight_kind), draws, matcher, autocast)
        if not yardstick:
            return draws, theirs, None
        rounded = copy.deepcopy(exact).to(kind).float()
        return draws, theirs, _run(rounded, [[t.float() for t in each] for each in draws], matcher, False)


@dataclass
class _Run:
    """One entry of the first dim for each of the inputs that a module was run on."""

    output: Tensor
    inputs: list[Tensor | None]
    weights: list[Tensor | None]
    more: Any


def _run(part: nn.Module, draws: list[list[Tensor]], matcher: Matcher, autocast: bool) -> _Run:
    runs = [_run_once(part, inputs, matcher, autocast) for inputs in draws]

    def stacked(lists: list[list[Tensor | None]]) -> list[Tensor | None]:
        return [None if any(t is None for t in each) else torch.stack(each) for each in zip(*lists, strict=True)]  # type: ignore[arg-type]

    return _Run(
        torch.stack([r.output for r in runs]),
        stacked([r.inputs for r in runs]),
        stacked([r.weights for r in runs]),
        [r.more for r in runs],
    )


def _run_once(part: nn.Module, inputs: list[Tensor], matcher: Matcher, autocast: bool) -> _Run:
    arguments = [t.clone().requires_grad_(True) for t in inputs]
    device = inputs[0].device
    part.zero_grad(set_to_none=True)
    with torch.enable_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # the same dropout in both
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            output, more = matcher.call(part.train(), arguments)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    with torch.enable_grad():
        output.backward(slope)
    weights = dict(part.named_parameters())
    return _Run(output.detach(), [t.grad for t in arguments], [weights[n].grad for n in sorted(weights)], more)


def _differences(own: _Run, theirs: _Run, error: Callable[..., float], truth: _Run | None = None) -> dict[str, float]:
    def largest(name: str) -> float:
        lists = [getattr(run, name) for run in (own, theirs, truth) if run is not None]
        return max((error(*each) for each in zip(*lists, strict=True)), default=0.0)

    outputs = [run.output for run in (own, theirs, truth) if run is not None]
    return {"forward": error(*outputs), "input gradient": largest("inputs"), "weight gradient": largest("weights")}


def _relative(own: Tensor | None, original: Tensor | None) -> float:
    if own is None or original is None:
        return 0.0 if own is original else float("inf")
    return relative_error(own, original)


def _times_as_wrong(own: Tensor | None, original: Tensor | None, truth: Tensor | None) -> float:
    """Our error over the original's, which counts as at least a thousandth: a quarter of a bf16 step."""
    if own is None or original is None or truth is None:
        return 0.0 if own is original is truth else float("inf")
    return relative_error(own, truth) / max(relative_error(original, truth), 1e-3)
