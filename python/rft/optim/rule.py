"""What an optimizer does to one tensor: its state, and how a gradient changes both. Everything around it is optimizer.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft.optim.rounding import Noise

CHUNK = 1 << 24
"""Numbers of a tensor that are updated at a time where that takes fp32 copies: 64 MiB each."""


@dataclass
class Item:
    """A weight with what belongs to it in this step. The tensors may be DTensors, of which every rank updates its part."""

    name: str
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    step: int
    """From 1: steps that this weight was in, this one counted."""
    copy: Tensor | None = None
    """What the module computes with, where that is a narrower tensor than the weight."""
    copied: bool = False
    """Whether the rule has written the copy; it is written behind it otherwise."""
    factor: Tensor | None = None
    """Scalar on the device by which the gradient is still to be multiplied; given to rules alone that take it."""


class Rule(Protocol):
    """One way to update weights."""

    sharded: bool
    """Whether it serves weights of which a rank holds a part."""
    takes_factor: bool
    """Whether it multiplies gradients by `Item.factor` itself."""

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        """State before the first step, by name; on the weight's device."""
        ...

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        """Change weights and states in place. The host waits for no device."""
        ...


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; a plain tensor is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(tensor: Tensor) -> str:
    """Which part of the whole this rank holds, for noise of its own; "" of a plain tensor."""
    return str(tensor.device_mesh.get_coordinate()) if isinstance(tensor, DTensor) else ""


def zeros_like(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(weight, dtype=dtype, requires_grad=False)


def chunks(*tensors: Tensor, size: int = CHUNK) -> Iterator[tuple[Tensor, ...]]:
    """Flat views of at most `size` numbers of tensors of one shape; whole ones where one is not contiguous."""
    first, *rest = (local(t) for t in tensors)
    if first.numel() <= size or not all(t.is_contiguous() for t in (first, *rest)):
        yield (first, *rest)
        return
    yield from zip(*(t.view(-1).split(size) for t in (first, *rest)), strict=True)


def scale_gradients(items: list[Item]) -> None:
    """Multiply gradients by the factor that they still lack."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for item in items:
        if item.factor is not None:
            by_dtype.setdefault(item.gradient.dtype, []).append(local(item.gradient))
    for dtype, gradients in by_dtype.items():
        assert items[0].factor is not None
        torch._foreach_mul_(gradients, items[0].factor.to(dtype))
