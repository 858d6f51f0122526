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
from support.close import assert_close_fp32, assert_no_worse

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
    with_product = grad_branch is not None
    d_gate, d_up, again, product = lora_gated_activation_backward(
        grad, gate, up, grad_branch, gate_branch, up_branch, activation, want_output=True, want_product=with_product
    )
    assert torch.equal(y, again)
    for name, g, p, t in zip(("output", "gate", "up"), (y, d_gate, d_up), eager, truth, strict=True):
        assert_no_worse(g, p, t, what=name)
    if with_product:  # exact products of the inputs, fp32 sums
        assert product.dtype == torch.float32
        assert_close_fp32(product, grad_branch.left.float().t() @ y.float(), 1e-5, what="product")
    d_gate_too, d_up_too, *nothing = lora_gated_activation_backward(
        grad, gate, up, grad_branch, gate_branch, up_branch, activation
    )
    assert nothing == [None, None]
    assert torch.equal(d_gate, d_gate_too)
    assert torch.equal(d_up, d_up_too)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [(4, 16, 7), (16, 0, 16), (33, 5, 0)], ids=str)
@pytest.mark.parametrize("shape", [(70, 200), (3, 17), (200, 300)], ids=str)
def test_the_product_is_that_with_the_output_that_is_not_written(device, shape, ranks, dtype):
    gate, up, grad, branches = drawn(*shape, ranks, dtype, device)
    got = lora_gated_activation_backward(grad, gate, up, *branches, want_product=True)
    alone = lora_gated_activation_backward(grad, gate, up, *branches, want_output=True)
    assert torch.equal(got.gate, alone.gate)
    assert torch.equal(got.up, alone.up)
    # exact products of the inputs, fp32 sums
    assert_close_fp32(got.product, branches[0].left.float().t() @ alone.y.float(), 1e-5)
    again = lora_gated_activation_backward(grad, gate, up, *branches, want_product=True)
    assert torch.equal(got.product, again.product)


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
    for g, w in zip(got[:2], wanted[:2], strict=True):
        assert torch.equal(g, w)


def test_without_branches_it_is_the_gated_activation(device):
    gate, up, _, _ = drawn(5, 33, (0, 0, 0), torch.float32, device)
    assert torch.equal(lora_gated_activation(gate, up, None, None), gated_activation(gate, up))


def test_no_rows(device):
    gate, up, grad, branches = drawn(0, 8, (2, 2, 2), torch.float32, device)
    assert lora_gated_activation(gate, up, *branches[1:]).shape == (0, 8)
    got = lora_gated_activation_backward(grad, gate, up, *branches, want_output=True, want_product=True)
    assert got.y.shape == got.gate.shape == got.up.shape == (0, 8)
    assert torch.equal(got.product, torch.zeros(2, 8, device=device))


def test_wrong_arguments_are_refused_by_name(device):
    gate, up, _, (_, fit, _) = drawn(6, 8, (0, 2, 0), torch.float32, device)
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        lora_gated_activation(gate, up, fit, None, "tanh")
    with pytest.raises(ValueError, match="beside a gate of"):
        lora_gated_activation(gate, up[:3], fit, None)
    with pytest.raises(ValueError, match="wanted \\(6, r\\) and \\(8, r\\)"):
        lora_gated_activation(gate, up, LowRank(fit.left[:5], fit.right), None)
    grad = torch.ones_like(gate)
    with pytest.raises(ValueError, match="a branch that is not there"):
        lora_gated_activation_backward(grad, gate, up, None, fit, None, want_product=True)
    wide = branch(MAX_RANK + 1, 6, 8, torch.float32, device)
    with pytest.raises(ValueError, match=f"r from 1 to {MAX_RANK}"):
        lora_gated_activation(gate, up, None, wide)


def test_registered_ops_pass_opcheck(device):
    gate, up, grad, branches = drawn(6, 40, (4, 4, 4), torch.float32, device)
    d, g, u = branches
    checks = ("test_schema", "test_faketensor")  # they are steps of other ops: no gradient
    torch.library.opcheck(_lora_gated_activation, (gate, up, *g, *u, "silu"), test_utils=checks)
    torch.library.opcheck(
        _lora_gated_activation_backward,
        (grad, gate, up, *d, *g, None, None, "silu", True, True),
        test_utils=checks,
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
    wanted = {"want_output": True, "want_product": True}
    lora_gated_activation_backward(grad, gate, up, *branches, **wanted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        lora_gated_activation_backward(grad, gate, up, *branches, **wanted)
    finally:
        torch.cuda.set_sync_debug_mode("default")
