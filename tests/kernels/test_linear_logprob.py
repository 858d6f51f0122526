import pytest
import torch

from rft.kernels import linear_logprob as module
from rft.kernels.linear_logprob import _linear_logprob, linear_logprob, linear_logprob_reference
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
M, H, V = 11, 24, 2100


def make(device, dtype=torch.float32, rows=M):
    hidden = torch.randn(rows, H, device=device).to(dtype)
    weight = (torch.randn(V, H, device=device) * 0.5).to(dtype)
    labels = torch.randint(V, (rows,), device=device)
    labels[3] = -100
    return hidden, weight, labels, torch.randn(V, device=device).to(dtype)


def run(function, hidden, weight, labels, bias, upstream, *, train_weight=True, **options):
    hidden = hidden.detach().requires_grad_()
    weight, bias = weight.detach().requires_grad_(train_weight), bias.detach().requires_grad_(train_weight)
    out = function(hidden, weight, labels, bias=bias, **options)
    sum((o * u).sum() for o, u in zip(out, upstream, strict=True)).backward()
    return [o.detach() for o in out], [t.grad for t in (hidden, weight, bias) if t.requires_grad]


def relative_error(got, truth):
    return float((got - truth).norm() / truth.norm())


def plain(hidden, weight, labels, bias, **options):
    """As the reference, with logits in the dtype of the inputs, as eager torch has them."""
    eye = torch.eye(weight.shape[0], device=weight.device)
    return linear_logprob_reference(torch.nn.functional.linear(hidden, weight, bias), eye, labels, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "softcap": 3.0}], ids=str)
def test_log_probability_lse_entropy_and_every_gradient_match_the_reference(
    device, options, train_weight, dtype, monkeypatch
):
    monkeypatch.setattr(module, "FORWARD_ROWS", 4)
    monkeypatch.setattr(module, "FORWARD_COLUMNS", 1024)
    # a row's entropy hangs on the roundings of its few largest logits: in bf16, where rounding errors are compared, many rows
    rows = M if dtype == torch.float32 else 1001
    inputs = make(device, dtype, rows)
    upstream = torch.rand(3, rows, device=device)
    truth = run(
        linear_logprob_reference,
        *(t.float() if t.is_floating_point() else t for t in inputs),
        upstream,
        train_weight=train_weight,
        **options,
    )
    eager = run(plain, *inputs, upstream, train_weight=train_weight, **options)
    got = run(linear_logprob, *inputs, upstream, train_weight=train_weight, want_entropy=True, **options)
    for name, g, p, t in zip(("logp", "lse", "entropy"), got[0], eager[0], truth[0], strict=True):
        assert_close_fp32(g, t, 1e-5 if dtype == torch.float32 else 1.1 * relative_error(p, t) + 1e-4, what=name)
    for name, g, p, t in zip(("hidden", "weight", "bias"), got[1], eager[1], truth[1], strict=False):
        assert_no_worse(g, p, t, what=f"gradient of {name}")


def test_only_the_log_probability_used_and_backward_twice(device):
    hidden, weight, labels, _ = make(device)
    hidden.requires_grad_()
    logp, _, entropy = linear_logprob(hidden, weight, labels)
    assert entropy is None
    logp.sum().backward(retain_graph=True)
    once = hidden.grad.clone()
    logp.sum().backward()
    assert torch.equal(hidden.grad, 2 * once)
    reference = hidden.detach().requires_grad_()
    linear_logprob_reference(reference, weight, labels)[0].sum().backward()
    assert_close_fp32(once, reference.grad)


def test_no_rows_give_zero_gradients(device):
    _, weight, labels, _ = make(device)
    weight.requires_grad_()
    logp, _, _ = linear_logprob(torch.empty(0, H, device=device, requires_grad=True), weight, labels[:0])
    logp.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_the_registered_op_passes_opcheck(device):
    hidden, weight, labels, bias = make(device)
    args = (hidden.requires_grad_(), weight.requires_grad_(), labels, bias.requires_grad_(), 1.0, 0.0, -100, True)
    torch.library.opcheck(_linear_logprob, args)
