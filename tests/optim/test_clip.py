"""Clipping: the norm over everything, plain and sharded, whatever the dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft.optim.clip import clip_grad_norm


def parameters(*gradients: torch.Tensor) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        made.append(parameter)
    return made


def test_gradients_are_scaled_to_the_norm_and_the_old_norm_is_returned():
    both = parameters(torch.tensor([3.0]), torch.tensor([[4.0]]))
    assert clip_grad_norm(both, 1.0).item() == pytest.approx(5.0)
    assert [p.grad.item() for p in both] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_small_gradients_and_no_limit_leave_them_alone():
    for limit in (6.0, "none"):
        both = parameters(torch.tensor([3.0]), torch.tensor([[4.0]]))
        assert clip_grad_norm(both, limit).item() == pytest.approx(5.0)
        assert [p.grad.item() for p in both] == [3.0, 4.0]


def test_dtypes_may_differ_and_the_norm_is_fp32():
    both = parameters(torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16))
    norm = clip_grad_norm(both, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(5.0)
    assert both[1].grad.item() == pytest.approx(0.8, rel=1e-2)


def test_parameters_without_a_gradient_are_left_out():
    both = parameters(torch.tensor([3.0]))
    both.append(nn.Parameter(torch.ones(2)))
    assert clip_grad_norm(both, 1.0).item() == pytest.approx(3.0)
    assert both[1].grad is None


def test_equals_torch_on_many_tensors():
    torch.manual_seed(0)
    gradients = [torch.randn(7, 5), torch.randn(3), torch.randn(2, 2, 2)]
    ours, theirs = parameters(*gradients), parameters(*gradients)
    assert clip_grad_norm(ours, 0.5).item() == pytest.approx(nn.utils.clip_grad_norm_(theirs, 0.5).item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
