"""How far a tensor is from another: the one measure that swaps, backends and quantised weights are judged and reported by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def relative_error(own: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of `truth`, in fp32. Waits for the device; a NaN in either gives NaN."""
    truth = truth.float()
    return float((own.float() - truth).norm() / truth.norm().clamp_min(1e-12))
