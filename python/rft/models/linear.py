"""PEFT's LoRA linears through the fused operations: one product for every branch that reads an input, none of them an own pass.

`read` is asked in every forward, so that switched-off, merged and several active adapters are respected as PEFT does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rft import quant
from rft.kernels import fp8
from rft.kernels.lora_linear import Branch, FrozenLinear, lora_linears
from rft.models.matching import Candidate, Matcher
from rft.quant.fp8 import Fp8Linear


def is_lora(module: nn.Module) -> bool:
    """A linear that PEFT has wrapped for LoRA."""
    children = module._modules  # asked of every linear in every forward
    if "lora_A" not in children or "base_layer" not in children:
        return False
    embedding = children.get("lora_embedding_A")
    return embedding is None or len(embedding) == 0  # type: ignore[arg-type]  # spelt out: torch 2.11 cannot trace its truth


def why_not_fused(module: nn.Module) -> str | None:
    """Why this linear is left to PEFT (or to torch), or None. Says what is set up, not what is switched on at the moment."""
    peft: Any = module
    if not is_lora(module):
        return None if quant.is_linear(module) else f"{type(module).__name__} is no plain linear"
    base = peft.get_base_layer()
    if not quant.is_linear(base):
        return f"its base is a {type(base).__name__}"
    if getattr(peft, "fan_in_fan_out", False):
        return "its base weight is transposed (fan_in_fan_out)"
    names = [a for a in peft.active_adapters if a in peft.lora_A]
    variants = sorted({type(v).__name__ for a, v in getattr(peft, "lora_variant", {}).items() if a in names})
    if variants:
        return f"it is a variant of LoRA ({', '.join(variants)})"
    if any(peft.lora_bias.get(a, False) for a in names):
        return "its adapter has a bias of its own"
    kinds = {type(peft.lora_dropout[a]) for a in names} - {nn.Dropout, nn.Identity}
    others = sorted(kind.__name__ for kind in kinds)
    return f"its dropout is a {', '.join(others)}" if others else None


class _Parts(NamedTuple):
    """What of a PEFT layer is looked up once, and again where one of them is another one: a step reads 224 linears."""

    outer: nn.Module
    names: tuple[str, ...]
    """Active adapters that this layer has."""
    each: tuple[tuple[nn.Module, nn.Module, nn.Module], ...]
    """A, B and dropout of each."""
    base: nn.Module
    why_not: str | None


def _parts(peft: Any) -> _Parts:
    modules = peft._modules  # attributes of a module are looked up in three of these one after another
    As, Bs, drops = (modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    names = tuple(a for a in peft.active_adapters if a in As)
    kept: _Parts | None = peft.__dict__.get("rft_parts")
    if (
        kept is not None
        and kept.outer is modules["base_layer"]
        and kept.names == names
        and all(As[n] is A and Bs[n] is B and drops[n] is d for n, (A, B, d) in zip(names, kept.each, strict=True))
    ):
        return kept
    each = tuple((As[n], Bs[n], drops[n]) for n in names)
    kept = _Parts(modules["base_layer"], names, each, peft.get_base_layer(), why_not_fused(peft))
    peft.__dict__["rft_parts"] = kept
    return kept


def read(module: nn.Module, *, inside: bool = False) -> FrozenLinear | None:
    """What the linear computes at the moment, or None where only the module itself knows.

    inside: asked from the module's own forward, around which its hooks run anyway.
    """
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return None  # autocast knows torch's own operations
    peft: Any = module
    if not is_lora(module):
        if not quant.is_linear(module) or hooked(module):
            return None
        plain = quant.held(module)
        return None if plain is None else FrozenLinear(plain, module.bias)  # type: ignore[arg-type]
    parts = _parts(peft)
    off, merged = peft.disable_adapters, peft.merged
    if parts.why_not or (off and merged) or (hooked(module) and not inside) or hooked(parts.base):
        return None
    held = quant.held(parts.base)
    if held is None:
        return None
    bias: Any = parts.base._parameters.get("bias")
    if off or merged:
        return FrozenLinear(held, bias)
    branches = []
    for name, (A, B, drop) in zip(parts.names, parts.each, strict=True):
        if hooked(A) or hooked(B) or hooked(drop):
            return None
        share = float(drop.p) if drop.training and isinstance(drop, nn.Dropout) else 0.0
        branches.append(Branch(A.weight, B.weight, float(peft.scaling[name]), share))  # type: ignore[arg-type]
    return FrozenLinear(held, bias, tuple(branches))


def child(module: nn.Module, name: str) -> nn.Module:
    """A direct child. `get_submodule` takes names of any depth, and some us, of which a step has 500."""
    return module._modules[name]  # type: ignore[return-value]


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to its forward: then it has to be called."""
    # spelt out: asked some 2,000 times a step
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def apply_linears(x: Tensor, modules: Sequence[nn.Module], quantised: fp8.Rows | None = None) -> tuple[Tensor, ...]:
    """Every module of x; those that can be read together, the others by themselves. quantised: x for FP8 weights, if it is known."""
    known = [read(module) for module in modules]
    if len(modules) > 1 and all(_is_trained(m, x) for m in modules):
        return _Trained.apply(x, len(modules), *(m.weight for m in modules), *(m.bias for m in modules))  # type: ignore[no-any-return]
    together = [k for k in known if k is not None and fits(k, x)]
    outs = iter(lora_linears(x, together, quantised) if together else ())
    return tuple(next(outs) if fits(k, x) else m(x) for m, k in zip(modules, known, strict=True))


def _is_trained(module: nn.Module, x: Tensor) -> bool:
    """Whether it is a plain linear whose weight gets a gradient, and nothing around it changes what it does."""
    if type(module) is not nn.Linear or hooked(module) or torch.is_autocast_enabled(x.device.type):
        return False
    weight = module.weight
    return type(weight) in (nn.Parameter, Tensor) and weight.requires_grad and weight.dtype == x.dtype


class _Trained(torch.autograd.Function):
    """Linears of one input, as F.linear computes each; the gradient of the input is summed by the products themselves."""

    @staticmethod
    def forward(ctx, x, number, *flat):
        weights, biases = flat[:number], flat[number:]
        ctx.save_for_backward(x, *weights)
        ctx.has_bias = [b is not None for b in biases]
        ctx.set_materialize_grads(False)
        return tuple(nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        d_rows, d_weights, d_biases = None, [], []
        for index, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
            needs_weight, needs_bias = (ctx.needs_input_grad[2 + index + i * len(weights)] for i in (0, 1))
            dy = None if dy is None else dy.reshape(-1, dy.shape[-1])
            if dy is not None and ctx.needs_input_grad[0]:
                d_rows = dy @ weight if d_rows is None else d_rows.addmm_(dy, weight)
            d_weights.append(dy.t() @ rows if dy is not None and needs_weight else None)
            d_biases.append(dy.sum(0) if dy is not None and needs_bias and ctx.has_bias[index] else None)
        return None if d_rows is None else d_rows.view(x.shape), None, *d_weights, *d_biases


def holds_fp8(module: nn.Module) -> bool:
    """Whether a linear's base weight is multiplied in FP8, so that it has use for a quantised input."""
    base: Any = module.get_base_layer() if is_lora(module) else module  # type: ignore[operator]
    return isinstance(base, Fp8Linear)


def fits(known: FrozenLinear | None, x: Tensor) -> bool:
    """Whether it was read, and takes inputs of this type."""
    return known is not None and known.weight_dtype in (None, x.dtype)


@cache
def _fused_class(kind: type) -> type:
    """The same class of PEFT's, so that PEFT finds and merges it as before, with a forward of ours."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        known = None if args or kwargs else read(self, inside=True)
        if not fits(known, x):
            return kind.forward(self, x, *args, **kwargs)  # type: ignore[attr-defined]
        assert known is not None
        return lora_linears(x, [known])[0]

    return type(kind.__name__, (kind,), {"forward": forward, "rft_fused": True, "__module__": kind.__module__})


def _fused(original: nn.Module) -> nn.Module:
    return as_class(original, _fused_class(type(original)))  # type: ignore[arg-type]


def as_class(original: nn.Module, kind: type) -> nn.Module:
    """A module of another class with the original's attributes, parameters and children, under their names and in their order."""
    made: Any = nn.Module.__new__(kind)
    made.__dict__.update(original.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(original.__dict__[name])
    return made


def _looks_like_lora_linear(module: nn.Module) -> bool:
    return is_lora(module) and not getattr(module, "rft_fused", False)


def _candidates(module: nn.Module) -> list[Candidate] | str:
    why = why_not_fused(module)
    dropped = any(getattr(m, "p", 0.0) for m in module.lora_dropout.values())  # type: ignore[union-attr,operator]
    how = "small products shared, added into the output in place" + (
        ", masks of dropout drawn inside" if dropped else ""
    )
    return why if why else [Candidate(how, _fused)]


def without_dropout(module: nn.Module) -> None:
    """Ours draws other masks than torch: what is compared is everything else (the masks: tests/kernels/test_dropout.py)."""
    for each in module.modules():
        for drop in each.lora_dropout.values() if is_lora(each) else ():  # type: ignore[union-attr,operator]
            if isinstance(drop, nn.Dropout):
                drop.p = 0.0


def width_in(module: nn.Module) -> int:
    """Inputs of a linear, wrapped or not."""
    base: Any = module.get_base_layer() if is_lora(module) else module  # type: ignore[operator]
    return base.in_features


def _inputs(module: nn.Module, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(2, 7, width_in(module), generator=generator),)


LORA_LINEAR = Matcher(
    "lora linear",
    _looks_like_lora_linear,
    _candidates,
    _inputs,
    rounding="no worse",
    train_all=False,
    prepare=without_dropout,
)
