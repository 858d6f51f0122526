"""What a swap is made of: a kind of part, how it is recognised by structure, and what could replace it. `surgery.py` compares and swaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Candidate:
    """One module that may equal the original."""

    how: str
    build: Callable[[nn.Module], nn.Module]
    """Original -> ours, sharing its parameters under the same names."""


def _call(part: nn.Module, tensors: list[Tensor]) -> tuple[Tensor, Any]:
    return part(*tensors), None


@dataclass(frozen=True)
class Matcher:
    """One kind of part: what it looks like, what could replace it, and inputs to compare on."""

    what: str
    matches: Callable[[nn.Module], bool]
    candidates: Callable[[nn.Module], list[Candidate] | str]
    """What could replace it, or why nothing can."""
    inputs: Callable[[nn.Module, torch.Generator], tuple[Tensor, ...]]
    """Tensors that get a gradient."""
    call: Callable[[nn.Module, list[Tensor]], tuple[Tensor, Any]] = _call
    """Module and inputs -> (output, anything that has to be equal besides)."""
    rounding: Literal["same", "no worse"] = "same"
    """What bf16 is held to: the original's own roundings; or no larger an error than the original's, where products are summed
    in another order."""
    kernels: bool = True
    """Whether candidates run Triton kernels, whose bf16 says nothing in the interpreter."""
    prepare: Callable[[nn.Module], None] | None = None
    """Done to the copy that is compared, before anything is built from it: takes out what cannot be compared (dropout)."""
    train_all: bool = True
    """Whether every parameter gets a gradient in the comparison, or those that the run trains."""
    key: Callable[[nn.Module], Any] = lambda module: None
    """What two modules differ in besides their attributes and shapes."""
