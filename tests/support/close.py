"""How close is close: one place for the rules that tests compare numbers by."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest true value."""
    got, truth = got.detach().float(), truth.detach().float()
    return float((got - truth).abs().max() / truth.abs().max().clamp_min(1e-12))


def assert_close(got: Tensor, truth: Tensor, allowed: float = 1e-5, what: str = "") -> None:
    """The largest difference is at most `allowed` times the largest true value."""
    error = relative_error(got, truth)
    assert error <= allowed, f"{what or 'tensor'}: relative error {error:.2e}, allowed {allowed:.0e}"


def assert_close_fp32(got: Tensor, truth: Tensor, allowed: float = 1e-5, what: str = "") -> None:
    """The norm of the difference is at most `allowed` times the norm of the truth; a NaN fails."""
    assert got.shape == truth.shape, f"{what} shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    difference, size = float((got.double() - truth.double()).norm()), float(truth.double().norm())
    error = difference / size if size else difference
    assert error <= allowed, f"{what} relative error {error:.3e}, allowed {allowed:.0e}"


def assert_no_worse(got: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0, what: str = "") -> None:
    """`got` may be at most `factor` times as far from the fp32 `truth` as `plain` torch in the same type; in fp32, 1e-5 from it."""
    assert got.dtype == plain.dtype, f"{what} dtype {got.dtype}, expected {plain.dtype}"
    if got.dtype == torch.float32:
        return assert_close_fp32(got, truth, what=what)
    floor = 8 * torch.finfo(torch.float32).eps * truth.abs().max()
    allowed = factor * (plain.float() - truth).abs().max() + floor
    error = (got.float() - truth).abs().max()
    assert error <= allowed, f"{what} max error {error:.3e}, allowed {allowed:.3e}"
    ours, theirs = (got.float() - truth).norm(), (plain.float() - truth).norm()
    assert ours <= 1.1 * theirs + 1e-4 * truth.norm(), f"{what} norm of the error {ours:.3e}, plain torch {theirs:.3e}"
    return None
