import pytest
import torch

from rft.kernels.rms_norm import (
    _add_rms_norm,
    _rms_norm,
    add_rms_norm,
    rms_norm,
    rms_norm_beside,
    rms_norm_reference,
)
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FORMS = [{}, {"cast_before_weight": False}, {"offset": 1.0, "cast_before_weight": False}]
SHAPES = [(1, 64), (5, 123), (3, 7, 1024), (70, 128), (9, 5000)]


def run(function, x, weight, grads, **form):
    """(outputs, gradients of every input); x is (x,) or (x, residual)."""
    x, weight = [t.detach().requires_grad_() for t in x], weight.detach().requires_grad_()
    out = function(*x, weight, 1e-5, **form)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(out, [g.to(o.dtype) for g, o in zip(grads, out, strict=True)])
    return [o.detach() for o in out] + [t.grad for t in x] + [weight.grad]


def add_reference(x, residual, weight, eps, **form):
    total = x + residual
    return rms_norm_reference(total, weight, eps, **form), total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("added", [False, True], ids=["plain", "added"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_every_gradient_match_the_reference(device, shape, added, form, dtype):
    x = [(torch.randn(shape, device=device) + 0.3).to(dtype) for _ in range(1 + added)]  # mean not 0
    weight = torch.randn(shape[-1], device=device).to(dtype)
    grads = [torch.randn(shape, device=device).to(dtype) for _ in range(1 + added)]
    reference, function = (add_reference, add_rms_norm) if added else (rms_norm_reference, rms_norm)
    truth = run(reference, [t.float() for t in x], weight.float(), grads, **form)
    plain = run(reference, x, weight, grads, **form)
    got = run(function, x, weight, grads, **form)
    for g, p, t in zip(got, plain, truth, strict=True):
        assert_no_worse(g, p, t)


def test_gemma_s_form_adds_one_in_fp32(device):
    """BO-23."""
    x, zeros = torch.tensor([[3.0, 4.0]], device=device), torch.zeros(2, device=device)
    assert torch.equal(rms_norm(x, zeros, 0.0), torch.zeros_like(x))
    expected = torch.tensor([[0.848528, 1.131371]], device=device)
    assert torch.allclose(rms_norm(x, zeros, 0.0, offset=1.0, cast_before_weight=False), expected, atol=1e-6)
    small = torch.full((2,), 0.00390625, dtype=torch.bfloat16, device=device)
    got = rms_norm(x, small, 0.0, offset=1.0, cast_before_weight=False) / expected
    assert torch.allclose(got, torch.tensor(1.00390625, device=device), atol=1e-6)


def test_a_frozen_weight_gets_no_gradient_and_changes_no_other(device):
    x, grad, weight = (
        torch.randn(6, 40, device=device),
        torch.randn(6, 40, device=device),
        torch.randn(40, device=device),
    )
    expected = run(rms_norm, [x], weight, [grad])[1]
    x = x.requires_grad_()
    rms_norm(x, weight, 1e-5).backward(grad)
    assert torch.equal(x.grad, expected)
    assert weight.grad is None


def test_only_the_sum_or_only_the_norm_used_downstream(device):
    x, residual, weight = (
        torch.randn(4, 40, device=device),
        torch.randn(4, 40, device=device),
        torch.randn(40, device=device),
    )
    for which in (0, 1):
        grads = []
        for function in (add_rms_norm, add_reference):
            a, b = x.detach().requires_grad_(), residual.detach().requires_grad_()
            function(a, b, weight, 1e-5)[which].square().sum().backward()
            grads.append((a.grad, b.grad))
        for got, wanted in zip(*grads, strict=True):
            assert_close_fp32(got, wanted)


def test_sum_s_gradient_survives_other_users_of_the_residual(device):
    """The sum goes on as the next residual, as in a decoder layer: its gradient must not be overwritten by the norm's."""
    (x, residual), weight = torch.randn(2, 4, 40, device=device), torch.randn(40, device=device)
    grads = []
    for function in (add_rms_norm, add_reference):
        a, b = x.detach().requires_grad_(), residual.detach().requires_grad_()
        normed, total = function(a, b, weight, 1e-5)
        (normed.sin() * total + total.cos()).sum().backward()
        grads.append((a.grad, b.grad))
    for got, wanted in zip(*grads, strict=True):
        assert_close_fp32(got, wanted)


def test_strided_inputs_and_expanded_gradients_give_the_same(device):
    wide, weight = torch.randn(6, 200, device=device), torch.randn(70, device=device)
    x, grad = wide[:, 60:130], torch.randn(70, device=device).expand(6, 70)
    expected = run(rms_norm, [x.contiguous()], weight, [grad.contiguous()])
    for view in (x, x.t().contiguous().t()):
        for g in (grad, grad.t().contiguous().t()):
            for got, wanted in zip(run(rms_norm, [view], weight, [g]), expected, strict=True):
                assert_close_fp32(got, wanted)


def test_backward_twice_over_one_graph(device):
    x, weight = (
        torch.randn(4, 40, device=device, requires_grad=True),
        torch.randn(40, device=device, requires_grad=True),
    )
    out = rms_norm(x, weight)
    out.sum().backward(retain_graph=True)
    once = x.grad.clone(), weight.grad.clone()
    out.sum().backward()
    assert torch.equal(x.grad, 2 * once[0])
    assert torch.equal(weight.grad, 2 * once[1])


def test_no_rows_give_a_weight_gradient_of_zero(device):
    weight = torch.ones(8, device=device, requires_grad=True)
    rms_norm(torch.empty(0, 8, device=device), weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8, device=device))


def test_wrong_shapes_are_refused_by_name(device):
    with pytest.raises(ValueError, match="x has 5 columns"):
        rms_norm(torch.zeros(2, 5, device=device), torch.zeros(4, device=device))
    with pytest.raises(ValueError, match="differ"):
        add_rms_norm(torch.zeros(2, 5, device=device), torch.zeros(1, 5, device=device), torch.zeros(5, device=device))


def test_registered_ops_pass_opcheck_and_compile_into_one_graph(device):
    x, residual = (torch.randn(4, 40, device=device, requires_grad=True) for _ in range(2))
    weight, grad = torch.randn(40, device=device, requires_grad=True), torch.randn(4, 40, device=device)
    torch.library.opcheck(_rms_norm.op, (x, weight, 1e-5, 1.0, False))
    torch.library.opcheck(_add_rms_norm.op, (x, residual, weight, 1e-5, 0.0, True))
    compiled = torch.compile(add_rms_norm, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    for got, wanted in zip(
        run(compiled, [x, residual], weight, [grad, grad]),
        run(add_rms_norm, [x, residual], weight, [grad, grad]),
        strict=True,
    ):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_the_last_row_past_2_to_the_31_equals_the_same_row_alone(device):
    M, N = 524300, 4096
    x = torch.empty(M, N, dtype=torch.bfloat16, device=device).normal_()
    weight = torch.randn(N, dtype=torch.bfloat16, device=device)
    grad = torch.ones((), dtype=torch.bfloat16, device=device).expand(M, N)
    got = run(rms_norm, [x], weight, [grad])
    alone = run(rms_norm, [x[-1:]], weight, [grad[-1:]])
    for i in (0, 1):
        assert torch.equal(got[i][-1:], alone[i])
        assert got[i][-1].abs().sum() > 0


@pytest.mark.gpu
def test_the_host_never_waits_the_step_can_be_captured_and_repeats_are_bit_equal(device):
    x, grad = torch.randn(2, 3000, 512, device=device, dtype=torch.bfloat16).unbind()
    weight = torch.randn(512, device=device, dtype=torch.bfloat16)
    expected = run(add_rms_norm, [x, x], weight, [grad, grad])
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(add_rms_norm, [x, x], weight, [grad, grad])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(add_rms_norm, [x, x], weight, [grad, grad])
    graph.replay()
    for a, b, wanted in zip(again, captured, expected, strict=True):
        assert torch.equal(a, wanted)
        assert torch.equal(b, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("used", ["both", "norm", "beside"])
def test_beside_the_norm_the_input_goes_on_and_its_gradients_are_summed(device, used, dtype):
    x = torch.randn(7, 300, device=device).to(dtype)
    weight = torch.rand(300, device=device).to(dtype)
    slopes = torch.randn(2, 7, 300, device=device).to(dtype)

    def run(kind, function):
        leaves = [t.to(kind, copy=True).requires_grad_() for t in (x, weight)]
        y, same, *_ = function(*leaves)
        wanted = {"both": (0, 1), "norm": (0,), "beside": (1,)}[used]
        torch.autograd.backward([(y, same)[i] for i in wanted], [slopes[i].to(kind) for i in wanted])
        return [y.detach(), same.detach(), leaves[0].grad, *([leaves[1].grad] if used != "beside" else [])]

    def plain(x, weight):
        return rms_norm_reference(x, weight), x * 1

    truth, eager = run(torch.float32, plain), run(dtype, plain)
    for got, p, t in zip(run(dtype, rms_norm_beside), eager, truth, strict=True):
        assert_no_worse(got, p, t)
    y, _, rows = rms_norm_beside(x, weight, quantise=True)
    assert torch.equal(y, rms_norm(x, weight))
    assert rows.q.shape == (7, 300)
