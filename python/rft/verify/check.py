"""One line of `rft verify`: what was compared, how far apart it is, how far apart it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FP32 = 1e-5
"""Allowed between two fp32 computations of one thing: norm of the difference over the norm."""


@dataclass(frozen=True)
class Check:
    """error and allowed are None where nothing could be measured; `note` then says why."""

    name: str
    error: float | None
    allowed: float | None
    status: Literal["ok", "FAILED", "skipped"]
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measured(name: str, error: float, allowed: float, note: str = "") -> Check:
    """ok where the error is a number and at most what is allowed."""
    return Check(name, error, allowed, "ok" if error <= allowed else "FAILED", note)


def skipped(name: str, why: str) -> Check:
    return Check(name, None, None, "skipped", why)


def relative(value: float, reference: float) -> float:
    """Difference over the reference's size."""
    return abs(value - reference) / max(abs(reference), 1e-12)


def largest_difference(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Largest relative difference over tensors: norm of the difference over the norm.

    A tensor that is all but zero beside the others is measured against a thousandth of the largest norm: its rounding
    says nothing. Infinite where the names differ.
    """
    if ours.keys() != reference.keys():
        return float("inf")
    norms = {name: float(torch.linalg.vector_norm(t.double())) for name, t in reference.items()}
    floor = 1e-3 * max(norms.values(), default=0.0)
    worst = 0.0
    for name, tensor in reference.items():
        difference = float(torch.linalg.vector_norm(ours[name].double() - tensor.double()))
        error = difference / max(norms[name], floor, 1e-30)
        worst = error if error != error else max(worst, error)  # nan stays
        if worst != worst:
            break
    return worst
