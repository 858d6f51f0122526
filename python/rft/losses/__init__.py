"""Losses give sums by term; training/step.py divides, once, by the counts of the whole step."""

from __future__ import annotations

from collections.abc import Iterable

from rft.losses.sft import NEXT_TOKEN, ROUTER, SftLoss

LOSSES = {"sft": SftLoss}

__all__ = ["LOSSES", "NEXT_TOKEN", "ROUTER", "SftLoss", "sum_terms"]


def sum_terms(counts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Counts of several micro-batches, added by term."""
    total: dict[str, float] = {}
    for count in counts:
        for term, value in count.items():
            total[term] = total.get(term, 0.0) + value
    return total
