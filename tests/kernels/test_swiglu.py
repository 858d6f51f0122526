import pytest
import torch

from rft.kernels.swiglu import (
    ACTIVATIONS,
    _gated_activation,
    _gated_activation_fused,
    gated_activation,
    gated_activation_fused,
    gated_activation_reference,
)
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def run(function, gate, up, grad, *args):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = function(gate, up, *args)
    out.backward(grad.to(out.dtype))
    return out.detach(), gate.grad, up.grad


def eager(gate, up, activation):
    """As transformers has it: the activation in the dtype of its input, then the product."""
    ones = torch.ones_like(gate)
    return gated_activation_reference(gate, ones, activation) * up


def fused(gate, up, activation):
    return gated_activation_fused(torch.cat([gate, up], -1), activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", [gated_activation, fused], ids=["separate", "fused"])
@pytest.mark.parametrize("shape", [(1, 64), (5, 123), (2, 3, 2100)], ids=str)
def test_output_and_gradients_match_the_reference(device, shape, function, activation, dtype):
    gate, up, grad = ((3 * torch.randn(3, *shape, device=device)).to(dtype)).unbind()
    truth = run(gated_activation_reference, gate.float(), up.float(), grad.float(), activation)
    plain = run(eager, gate, up, grad, activation)
    got = run(function, gate, up, grad, activation)
    for name, g, p, t in zip(("output", "gate", "up"), got, plain, truth, strict=True):
        assert_no_worse(g, p, t, what=name)


def test_activations_are_torch_s_own(device):
    gate, up = torch.randn(2, 4, 50, device=device).unbind()
    gelu = torch.nn.functional.gelu
    assert_close_fp32(gated_activation(gate, up, "silu"), torch.nn.functional.silu(gate) * up)
    assert_close_fp32(gated_activation(gate, up, "gelu_tanh"), gelu(gate, approximate="tanh") * up)
    assert_close_fp32(gated_activation(gate, up, "gelu_erf"), gelu(gate) * up)
    assert_close_fp32(gated_activation(gate, up, "relu2"), gate.relu() ** 2 * up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_very_large_inputs_stay_finite(device, activation):
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device)
    truth = run(gated_activation_reference, gate, gate, gate, activation)
    for g, t in zip(run(gated_activation, gate, gate, gate, activation), truth, strict=True):
        assert torch.isfinite(g).all()
        assert_close_fp32(g, t)


def test_halves_of_a_fused_tensor_transposed_inputs_and_expanded_gradients_give_the_same(device):
    gate, up = torch.randn(2, 6, 70, device=device).unbind()
    grad = torch.randn(70, device=device).expand(6, 70)
    expected = run(gated_activation, gate, up, grad.contiguous())
    both = torch.cat([gate, up], -1)
    views = [(both[:, :70], both[:, 70:]), (gate.t().contiguous().t(), up)]
    for g, u in views:
        for upstream in (grad, grad.t().contiguous().t()):
            for got, wanted in zip(run(gated_activation, g, u, upstream), expected, strict=True):
                assert torch.equal(got, wanted)
    scalar = torch.ones((), device=device).expand(6, 70)
    for got, wanted in zip(
        run(gated_activation, gate, up, scalar),
        run(gated_activation, gate, up, torch.ones(6, 70, device=device)),
        strict=True,
    ):
        assert torch.equal(got, wanted)


def test_backward_twice_over_one_graph_and_inputs_left_alone(device):
    gate, up = torch.randn(2, 3, 40, device=device).unbind()
    before = gate.clone(), up.clone()
    gate = gate.detach().requires_grad_()
    out = gated_activation(gate, up)
    out.sum().backward(retain_graph=True)
    once = gate.grad.clone()
    out.sum().backward()
    assert torch.equal(gate.grad, 2 * once)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


def test_no_rows(device):
    gate = torch.empty(0, 8, device=device, requires_grad=True)
    gated_activation(gate, gate).sum().backward()
    assert gate.grad.shape == (0, 8)


def test_wrong_arguments_are_refused_by_name(device):
    x = torch.zeros(2, 5, device=device)
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        gated_activation(x, x, "tanh")
    with pytest.raises(ValueError, match="differ"):
        gated_activation(x, x[:1])
    with pytest.raises(ValueError, match="not two halves"):
        gated_activation_fused(x)


def test_registered_ops_pass_opcheck_and_compile_into_one_graph(device):
    gate, up = (torch.randn(4, 40, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(_gated_activation.op, (gate, up, "silu"))
    torch.library.opcheck(_gated_activation_fused.op, (gate, "gelu_tanh"))
    compiled = torch.compile(
        gated_activation, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor"
    )
    grad = torch.randn(4, 40, device=device)
    for got, wanted in zip(run(compiled, gate, up, grad), run(gated_activation, gate, up, grad), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_last_row_past_2_to_the_31_equals_the_same_row_alone(device, contiguous):
    M, N = 131080, 16384
    grad = torch.ones((), dtype=torch.bfloat16, device=device).expand(M, N)
    gate = torch.empty(M, N if contiguous else N + 8, dtype=torch.bfloat16, device=device).normal_()[:, :N]
    got = run(gated_activation, gate, gate, grad)
    alone = run(gated_activation, gate[-1:], gate[-1:], grad[-1:])
    for g, a in zip(got, alone, strict=True):
        assert torch.equal(g[-1:], a)
        assert g[-1].abs().sum() > 0


@pytest.mark.gpu
def test_the_host_never_waits_and_the_step_can_be_captured(device):
    gate, up, grad = torch.randn(3, 64, 512, device=device, dtype=torch.bfloat16).unbind()
    expected = run(gated_activation, gate, up, grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(gated_activation, gate, up, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(gated_activation, gate, up, grad)
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        assert torch.equal(got, wanted)
