"""How base weights are held, and the one function through which they are read."""

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
