"""How base weights are held, and the functions through which they are read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def read(linear: nn.Module) -> Tensor:
    """The plain weight [out, in] of a linear, whatever holds it. Looks through PEFT's layers to the base weight.

    Raises TypeError for a weight class that is not plain: kernels must never meet one.
    """
    base: Any = linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear  # type: ignore[operator]
    weight = base.weight
    if type(weight) not in (nn.Parameter, Tensor) or not weight.is_floating_point():
        raise TypeError(f"{type(linear).__name__} holds its weight as {type(weight).__name__} ({weight.dtype})")
    return weight


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear that the fused operations know: its weight is [out, in], held as `held` says."""
    return type(module) is nn.Linear or hasattr(type(module), "rft_held")


def held(linear: nn.Module) -> Any:
    """The frozen weight of a linear as the fused operations take it; None where it is trained or of another class."""
    own: Any = getattr(
        type(linear), "rft_held", None
    )  # of the class: asked of a module it is searched for among all that it holds
    if own is not None:
        return own(linear)
    weight: Any = linear.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point() and not weight.requires_grad
    return weight if plain else None
