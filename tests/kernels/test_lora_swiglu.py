import pytest
import torch

from rft.kernels.lora_swiglu import (
    MAX_RANK,
    LowRank,
    _lora_gated_activation,
    _lora_gated_activation_backward,
    lora_gated_activation,
    lora_gated_activation_backward,
    lora_gated_activation_reference,
)
from rft.kernels.swiglu import ACTIVATIONS, gated_activation
from support.close import assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
RANKS = [(4, 16, 0), (0, 0, 5), (64, 20, 16), (1, 0, 0)]


def branch(rank, T, N, dtype, device):
    if not rank:
        return None
    return LowRank(
        torch.randn(T, rank, device=device).to(dtype), (torch.randn(N, rank, device=device) * rank**-0.5).to(dtype)
    )


def drawn(T, N, ranks, dtype, device):
    gate, up, grad = (torch.randn(T, N, device=device).to(dtype) for _ in range(3))
    return gate, up, grad, [branch(r, T, N, dtype, device) for r in ranks]


def added(x, each):
    """In the dtype of x, as separate products do it."""
    return x if each is None else x + each.left @ each.right.t()


def through_autograd(gate, up, grad, grad_branch, gate_branch, up_branch, activation, call):
    """(y, d_gate, d_up) where y = call(gate + branch, up + branch)."""
    g, u = (added(x, b).detach().requires_grad_() for x, b in ((gate, gate_branch), (up, up_branch)))
    y = call(g, u, activation)
    y.backward(added(grad, grad_branch).to(y.dtype))
    return y.detach(), g.grad, u.grad


def plain(g, u, activation):
    return lora_gated_activation_reference(g, u, None, None, activation)


def widened(each):
    return None if each is None else LowRank(each.left.float(), each.right.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("shape", [(70, 200), (3, 17)], ids=str)
def test_output_and_gradients_match_the_reference(device, shape, ranks, activation, dtype):
    gate, up, grad, branches = drawn(*shape, ranks, dtype, device)
    grad_branch, gate_branch, up_branch = branches
    truth = through_autograd(gate.float(), up.float(), grad.float(), *(widened(b) for b in branches), activation, plain)
    eager = through_autograd(gate, up, grad, *branches, activation, plain)
    y = lora_gated_activation(gate, up, gate_branch, up_branch, activation)
    again, d_gate, d_up = lora_gated_activation_backward(
        grad, gate, up, grad_branch, gate_branch, up_branch, activation, want_output=True
    )
    assert torch.equal(y, again)
    for name, g, p, t in zip(("output", "gate", "up"), (y, d_gate, d_up), eager, truth, strict=True):
        assert_no_worse(g, p, t, what=name)
    none, d_gate_too, d_up_too = lora_gated_activation_backward(
        grad, gate, up, grad_branch, gate_branch, up_branch, activation
    )
    assert none is None
    assert torch.equal(d_gate, d_gate_too)
    assert torch.equal(d_up, d_up_too)


def test_views_of_wider_tensors_give_the_same_and_what_lies_beside_them_is_not_read(device):
    gate, up, grad, (_, gate_branch, _) = drawn(9, 40, (0, 4, 0), torch.float32, device)
    expected = lora_gated_activation(gate, up, gate_branch, None)
    wide = torch.full((9, 3 * 40), torch.nan, device=device)
    wide[:, 40:80] = gate
    left = torch.full((9, 12), torch.nan, device=device)
    left[:, 3:7] = gate_branch.left
    viewed = LowRank(left[:, 3:7], gate_branch.right.t().contiguous().t())
    assert torch.equal(lora_gated_activation(wide[:, 40:80], up, viewed, None), expected)
    got = lora_gated_activation_backward(grad.t().contiguous().t(), wide[:, 40:80], up, None, viewed, None)
    wanted = lora_gated_activation_backward(grad, gate, up, None, gate_branch, None)
    for g, w in zip(got[1:], wanted[1:], strict=True):
        assert torch.equal(g, w)


def test_without_branches_it_is_the_gated_activation(device):
    gate, up, _, _ = drawn(5, 33, (0, 0, 0), torch.float32, device)
    assert torch.equal(lora_gated_activation(gate, up, None, None), gated_activation(gate, up))


def test_no_rows(device):
    gate, up, grad, branches = drawn(0, 8, (2, 2, 2), torch.float32, device)
    assert lora_gated_activation(gate, up, *branches[1:]).shape == (0, 8)
    y, d_gate, d_up = lora_gated_activation_backward(grad, gate, up, *branches, want_output=True)
    assert y.shape == d_gate.shape == d_up.shape == (0, 8)


def test_wrong_arguments_are_refused_by_name(device):
    gate, up, _, (_, fit, _) = drawn(6, 8, (0, 2, 0), torch.float32, device)
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        lora_gated_activation(gate, up, fit, None, "tanh")
    with pytest.raises(ValueError, match="beside a gate of"):
        lora_gated_activation(gate, up[:3], fit, None)
    with pytest.raises(ValueError, match="wanted \\(6, r\\) and \\(8, r\\)"):
        lora_gated_activation(gate, up, LowRank(fit.left[:5], fit.right), None)
    wide = branch(MAX_RANK + 1, 6, 8, torch.float32, device)
    with pytest.raises(ValueError, match=f"r from 1 to {MAX_RANK}"):
        lora_gated_activation(gate, up, None, wide)


def test_registered_ops_pass_opcheck(device):
    gate, up, grad, branches = drawn(6, 40, (4, 4, 4), torch.float32, device)
    d, g, u = branches
    checks = ("test_schema", "test_faketensor")  # they are steps of other ops: no gradient
    torch.library.opcheck(_lora_gated_activation, (gate, up, *g, *u, "silu"), test_utils=checks)
    torch.library.opcheck(
        _lora_gated_activation_backward, (grad, gate, up, *d, *g, None, None, "silu", True), test_utils=checks
    )


@pytest.mark.gpu
def test_the_last_row_past_2_to_the_31_equals_the_same_row_alone(device):
    M, N = 131080, 16384
    gate = torch.empty(M, N, dtype=torch.bfloat16, device=device).normal_()
    one = branch(16, M, N, torch.bfloat16, device)
    last = LowRank(one.left[-64:], one.right)
    got = lora_gated_activation(gate, gate, one, None)
    alone = lora_gated_activation(gate[-64:], gate[-64:], last, None)
    assert torch.equal(got[-1], alone[-1])
    assert got[-1].abs().sum() > 0


@pytest.mark.gpu
def test_the_host_never_waits(device):
    gate, up, grad, branches = drawn(64, 512, (16, 16, 16), torch.bfloat16, device)
    lora_gated_activation_backward(grad, gate, up, *branches, want_output=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        lora_gated_activation_backward(grad, gate, up, *branches, want_output=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
