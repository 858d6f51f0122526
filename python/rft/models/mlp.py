"""The gated MLP, down(activation(gate(x)) * up(x)), in one piece: the activation is a kernel, LoRA's products are fused.

Gate and up may be two linears or the halves of one. Which linear is which, and which activation it is, is found by comparing.
"""

from __future__ import annotations

import inspect
from itertools import permutations
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rft import quant
from rft.kernels import fp8
from rft.kernels.lora_linear import lora_gated_mlp
from rft.kernels.swiglu import Activation, gated_activation, gated_activation_fused
from rft.models.linear import apply_linears, as_class, child, fits, is_lora, read, width_in, without_dropout
from rft.models.matching import Candidate, Matcher


class GatedMLP(nn.Module):
    """Stands in for an MLP of three linears; shares its children under their names."""

    rft_roles: tuple[str, str, str]
    rft_activation: Activation

    @property
    def rft_readers(self) -> tuple[nn.Module, ...]:
        """The linears that read its input."""
        return tuple(child(self, name) for name in self.rft_roles[:-1])

    def forward(self, x: Tensor, quantised: fp8.Rows | None = None) -> Tensor:
        """quantised: x as (T, D) for FP8 weights, where the norm before gave it."""
        gate, up, down = (child(self, name) for name in self.rft_roles)
        known = [read(gate), read(up), read(down)]
        if all(fits(k, x) for k in known):
            return lora_gated_mlp(x, *known, self.rft_activation, quantised)  # type: ignore[arg-type,call-arg]
        g, u = apply_linears(x, (gate, up), quantised)
        return apply_linears(gated_activation(g, u, self.rft_activation), (down,))[0]


class FusedGatedMLP(nn.Module):
    """Stands in for an MLP whose gate and up are the halves of one linear."""

    rft_roles: tuple[str, str]
    rft_activation: Activation

    @property
    def rft_readers(self) -> tuple[nn.Module, ...]:
        """The linear that reads its input."""
        return (child(self, self.rft_roles[0]),)

    def forward(self, x: Tensor, quantised: fp8.Rows | None = None) -> Tensor:
        """quantised: as in `GatedMLP`."""
        gate_up, down = (child(self, name) for name in self.rft_roles)
        (both,) = apply_linears(x, (gate_up,), quantised)
        return apply_linears(gated_activation_fused(both, self.rft_activation), (down,))[0]


def linears_of(module: nn.Module) -> dict[str, nn.Module]:
    """Children that are linears, wrapped by PEFT or not."""
    return {
        n: m for n, m in module.named_children() if quant.is_linear(m) or (is_lora(m) and quant.is_linear(_base(m)))
    }


def _base(module: Any) -> nn.Module:
    return module.get_base_layer()


def width_out(module: nn.Module) -> int:
    base: Any = _base(module) if is_lora(module) else module
    return base.out_features


def looks_like_gated_mlp(module: nn.Module) -> bool:
    """Two or three linears that lead from one width back to it, and nothing else that holds parameters."""
    if isinstance(module, (GatedMLP, FusedGatedMLP)) or next(module.parameters(recurse=False), None) is not None:
        return False
    linears = linears_of(module)
    arguments = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if (
        len(arguments) != 1
        or len(linears) not in (2, 3)
        or any(next(m.parameters(), None) is not None for n, m in module.named_children() if n not in linears)
    ):
        return False
    return bool(_roles(module))


def _roles(module: nn.Module) -> list[tuple[str, ...]]:
    """Names in the order (gate, up, down) or (gate and up, down) that fit the widths."""
    linears = linears_of(module)
    found: list[tuple[str, ...]] = []
    for names in permutations(linears):
        *first, last = names
        width, inner = width_in(linears[first[0]]), width_in(linears[last])
        wanted = inner if len(first) == 2 else 2 * inner
        if all(width_in(linears[n]) == width and width_out(linears[n]) == wanted for n in first):
            found.append(names)
    return found


def _candidates(module: nn.Module) -> list[Candidate]:
    def building(roles: tuple[str, ...], activation: Activation):
        def build(original: nn.Module) -> nn.Module:
            made = as_class(original, GatedMLP if len(roles) == 3 else FusedGatedMLP)
            made.__dict__.update(rft_roles=roles, rft_activation=activation)
            return made

        return build

    return [
        Candidate(f"{activation}({roles[0]}) * {roles[1] if len(roles) == 3 else 'its other half'}, {roles[-1]}", building(roles, activation))
        for activation in get_args(Activation)
        for roles in _roles(module)
    ]  # fmt: skip


def _inputs(module: nn.Module, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(1, 13, width_in(module.get_submodule(_roles(module)[0][0])), generator=generator),)


GATED_MLP = Matcher(
    "gated mlp",
    looks_like_gated_mlp,
    _candidates,
    _inputs,
    rounding="no worse",
    train_all=False,
    prepare=without_dropout,
)
