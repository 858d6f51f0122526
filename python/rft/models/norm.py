"""RMSNorm in the three castings that models use, through our kernel or `F.rms_norm`. N: columns, the last dim."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rft.models.matching import Candidate, Matcher

Casting = Literal["round_then_scale", "scale_then_round", "one_plus_weight"]

CASTINGS: dict[Casting, str] = {
    "round_then_scale": "rounds to the input's type, then multiplies by the weight (Llama)",
    "scale_then_round": "multiplies by the weight in fp32, then rounds (OLMo 2, GPT-OSS)",
    "one_plus_weight": "multiplies by 1 + weight in fp32, then rounds (Gemma)",
}


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim. Shares the weight of the module that it stands in for."""

    def __init__(self, weight: nn.Parameter, eps: float, casting: Casting, *, kernel: bool = False):
        super().__init__()
        self.weight = weight
        self.eps = self.variance_epsilon = eps  # both names are read by models
        self.casting = casting
        self.kernel = kernel

    def through_kernel(self, x: Tensor) -> bool:
        """Whether the kernel serves this input: a wider weight widens the result of `round_then_scale`, which the kernel does not."""
        return self.kernel and (self.casting != "round_then_scale" or x.dtype == self.weight.dtype)

    @property
    def kernel_options(self) -> dict[str, Any]:
        """How the kernels are told the casting."""
        return {
            "offset": float(self.casting == "one_plus_weight"),
            "cast_before_weight": self.casting == "round_then_scale",
        }

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, weight, shape = hidden_states, self.weight, (hidden_states.shape[-1],)
        if self.through_kernel(x):
            from rft.kernels.rms_norm import rms_norm

            return rms_norm(x, weight, self.eps, **self.kernel_options)
        if self.casting == "round_then_scale":
            # autocast makes F.rms_norm answer in fp32; the module it replaces does not
            return weight * F.rms_norm(x, shape, None, self.eps).to(x.dtype)
        if self.casting == "scale_then_round" and x.dtype == weight.dtype:
            return F.rms_norm(x, shape, weight, self.eps).to(x.dtype)
        scale = weight.float() if self.casting == "scale_then_round" else 1.0 + weight.float()
        return F.rms_norm(x.float(), shape, scale, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps:g}, {self.casting}{', kernel' if self.kernel else ''}"


def _epsilon(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def looks_like_rms_norm(module: nn.Module) -> bool:
    """One 1-D weight, an eps, nothing else, and a forward of exactly one argument (gated norms take a second)."""
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["weight"] or own["weight"].dim() != 1 or _epsilon(module) is None or isinstance(module, RMSNorm):
        return False
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    arguments = inspect.signature(module.forward).parameters.values()
    return len([a for a in arguments if a.kind is not a.VAR_KEYWORD]) == 1


def _candidates(module: nn.Module, kernels: bool) -> list[Candidate]:
    eps = _epsilon(module)
    assert eps is not None

    def building(casting: Casting) -> Callable[[nn.Module], nn.Module]:
        return lambda original: RMSNorm(original._parameters["weight"], eps, casting, kernel=kernels)  # type: ignore[arg-type]

    return [Candidate(words, building(casting)) for casting, words in CASTINGS.items()]


def _inputs(module: nn.Module, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A mean away from zero tells an RMSNorm from a norm that subtracts the mean (Cohere 2)."""
    columns = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    return (torch.randn(3, 5, columns, generator=generator) * 1.5 + 0.7,)


def rms_norm_matcher(*, kernels: bool) -> Matcher:
    """kernels: through our kernel; else through torch."""
    what = "rms_norm kernel" if kernels else "rms_norm"
    return Matcher(what, looks_like_rms_norm, lambda module: _candidates(module, kernels), _inputs, kernels=kernels)
