"""Trained linears that share an input: each computes what F.linear does, and their gradients of the input are one sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft.models.linear import apply_linears
from support.close import assert_close_fp32


def drawn(bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(24, n, bias=bias and n != 16) for n in (32, 16, 8)]


def run(x, modules, call, used=(0, 1, 2)):
    leaf = x.clone().requires_grad_()
    outs = call(leaf, modules)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(outs)]
    torch.autograd.backward([outs[i] for i in used], [slopes[i] for i in used])
    return outs, leaf.grad, [p.grad for m in modules for p in m.parameters()]


def plain(x, modules):
    return [m(x) for m in modules]


@pytest.mark.parametrize("used", [(0, 1, 2), (1,)], ids=["all", "one of three"])
def test_outputs_are_those_of_each_linear_and_gradients_agree(used):
    x = torch.randn(2, 5, 24)
    (outs, dx, grads), (truth, dx_truth, expected) = (run(x, drawn(), call, used) for call in (apply_linears, plain))
    assert {type(y.grad_fn).__name__ for y in outs} == {"_TrainedBackward"}
    for got, wanted in zip(outs, truth, strict=True):
        assert torch.equal(got, wanted)
    assert_close_fp32(dx, dx_truth, 1e-6)
    for got, wanted in zip(grads, expected, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.equal(got, wanted)


def test_an_input_without_a_gradient_a_frozen_bias_and_listeners():
    x, modules = torch.randn(5, 24), drawn()
    modules[0].bias.requires_grad_(False)
    outs = apply_linears(x, modules)
    sum(y.sum() for y in outs).backward()
    assert modules[0].bias.grad is None
    assert_close_fp32(modules[2].bias.grad, torch.full((8,), 5.0))
    heard = []
    modules[1].register_forward_hook(lambda *_: heard.append(1))
    again = apply_linears(x, modules)
    assert heard == [1]
    for got, wanted in zip(again, outs, strict=True):
        assert torch.equal(got, wanted)


def test_autocast_and_other_types_are_left_to_torch():
    x, modules = torch.randn(5, 24), drawn(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert {y.dtype for y in apply_linears(x, modules)} == {torch.bfloat16}
    frozen = [m.requires_grad_(False) for m in drawn()]
    assert all(y.grad_fn is None for y in apply_linears(x, frozen))
