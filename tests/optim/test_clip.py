"""Clipping: the norm over everything, whatever the dtypes, and the factor that an optimizer multiplies by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft.config.optim import AdamWConfig
from rft.optim.build import build
from rft.optim.clip import clip_factor, grad_norm


def parameters(*gradients: torch.Tensor) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        made.append(parameter)
    return made


def clipped(parameters, limit):
    """(norm, what the gradients are with the factor)."""
    norm = grad_norm(parameters)
    factor = clip_factor(norm, limit)
    return norm, [p.grad if factor is None else p.grad * factor for p in parameters]


def test_gradients_are_scaled_to_the_norm_and_the_old_norm_is_returned():
    norm, gradients = clipped(parameters(torch.tensor([3.0]), torch.tensor([[4.0]])), 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert [g.item() for g in gradients] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_small_gradients_and_no_limit_leave_them_alone():
    for limit in (6.0, "none"):
        norm, gradients = clipped(parameters(torch.tensor([3.0]), torch.tensor([[4.0]])), limit)
        assert norm.item() == pytest.approx(5.0)
        assert [g.item() for g in gradients] == [3.0, 4.0]


def test_dtypes_may_differ_and_the_norm_is_fp32():
    norm = grad_norm(parameters(torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)))
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(5.0)


def test_parameters_without_a_gradient_are_left_out():
    both = parameters(torch.tensor([3.0]))
    both.append(nn.Parameter(torch.ones(2)))
    assert grad_norm(both).item() == pytest.approx(3.0)
    assert both[1].grad is None


def test_equals_torch_on_many_tensors():
    torch.manual_seed(0)
    gradients = [torch.randn(7, 5), torch.randn(3), torch.randn(2, 2, 2)]
    ours, theirs = parameters(*gradients), parameters(*gradients)
    norm, found = clipped(ours, 0.5)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(theirs, 0.5).item(), rel=1e-6)
    for gradient, parameter in zip(found, theirs, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_every_path_of_an_optimizer_multiplies_by_the_factor_once(states):
    torch.manual_seed(0)
    first = [torch.randn(6, 4), torch.randn(3)]
    config = AdamWConfig(name="adamw", lr=1e-2, states=states)
    ours, theirs, factor = parameters(*first), parameters(*first), torch.tensor(0.25)
    for parameter in theirs:
        parameter.grad.mul_(0.25)
    for made, given in ((ours, factor), (theirs, None)):
        build([(str(i), p) for i, p in enumerate(made)], config).step(given)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
