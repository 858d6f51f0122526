import pytest
import torch

from rft.kernels import fp8
from rft.kernels.lora_linear import (
    Branch,
    FrozenLinear,
    lora_gated_mlp,
    lora_gated_mlp_reference,
    lora_linears,
    lora_linears_reference,
)
from rft.kernels.swiglu import ACTIVATIONS
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def linear(device, dtype, N, K, *ranks, bias=False):
    """A frozen linear with branches of these ranks; every trained tensor is a leaf."""

    def draw(*shape):
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)

    branches = tuple(
        Branch(draw(r, K).requires_grad_(), draw(N, r).requires_grad_(), 0.5 * (i + 1)) for i, r in enumerate(ranks)
    )
    return FrozenLinear(draw(N, K), draw(N).requires_grad_() if bias else None, branches)


def leaves(linears):
    for each in linears:
        yield from () if each.bias is None else (each.bias,)
        for branch in each.branches:
            yield from (branch.A, branch.B)


def as_fp32(linears):
    return [
        FrozenLinear(
            each.weight.float() if isinstance(each.weight, torch.Tensor) else each.weight,
            None if each.bias is None else each.bias.detach().float().requires_grad_(),
            tuple(
                Branch(b.A.detach().float().requires_grad_(), b.B.detach().float().requires_grad_(), b.scale)
                for b in each.branches
            ),
        )
        for each in linears
    ]


def run(function, x, linears):
    """Outputs and the gradients of x and of every trained tensor."""
    x = x.detach().requires_grad_()
    for leaf in leaves(linears):
        leaf.grad = None
    outs = function(x, linears)
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outs, [torch.randn(y.shape, generator=generator).to(y) for y in outs])
    return [*(y.detach() for y in outs), x.grad, *(leaf.grad for leaf in leaves(linears))]


def eager(x, linears):
    """As PEFT writes it, in the dtype of x."""
    outs = []
    for each in linears:
        y = torch.nn.functional.linear(x, each.weight, each.bias)
        for branch in each.branches:
            y = y + (x @ branch.A.t() @ branch.B.t()) * branch.scale
        outs.append(y)
    return tuple(outs)


def compare(ours, plain, reference, x, linears):
    truth = run(reference, x.float(), as_fp32(linears))
    for g, p, t in zip(run(ours, x, linears), run(plain, x, linears), truth, strict=True):
        assert_no_worse(g, p, t)


def enough(dtype, *small):
    """Sizes in bf16, where two rounding errors are compared: with some hundred roundings, luck makes one 1.5 times the other."""
    return small if dtype == torch.float32 else tuple(16 * n for n in small)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shapes",
    [((48, 4),), ((48, 4), (16, 4), (16, 4)), ((48, 2, 6), (32,)), ((24,),), ((40, 40),)],
    ids=["single", "qkv", "two adapters beside none", "no adapter", "rank above 32"],
)
def test_outputs_and_gradients_match_the_reference(device, shapes, dtype):
    (rows, columns), factor = enough(dtype, 9, 64), enough(dtype, 1)[0]
    linears = [
        linear(device, dtype, n * factor, columns, *ranks, bias=i % 2 == 0) for i, (n, *ranks) in enumerate(shapes)
    ]
    x = torch.randn(2, rows, columns, device=device).to(dtype)
    compare(lora_linears, eager, lora_linears_reference, x, linears)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", [(4, 4, 4), (4, 4, 0), (0, 0, 4), (0, 0, 0)], ids=str)
def test_the_gated_mlp_and_its_gradients_match_the_reference(device, ranks, activation, dtype):
    rows, width, inner = enough(dtype, 11, 32, 96)
    sizes = ((inner, width), (inner, width), (width, inner))
    linears = [linear(device, dtype, n, k, *([r] if r else [])) for (n, k), r in zip(sizes, ranks, strict=True)]
    x = torch.randn(rows, width, device=device).to(dtype)

    def plain(x, linears):
        g, u = eager(x, linears[:2])
        kind = {"silu": torch.nn.functional.silu, "relu2": lambda t: t.relu().square()}
        gelu = {"gelu_tanh": "tanh", "gelu_erf": "none"}
        act = kind.get(activation) or (lambda t: torch.nn.functional.gelu(t, approximate=gelu[activation]))
        return eager(act(g) * u, linears[2:])

    def reference(x, linears):
        return lora_gated_mlp_reference(x, *linears, activation)

    compare(lambda x, ls: lora_gated_mlp(x, *ls, activation), plain, reference, x, linears)


def test_a_frozen_input_gets_no_gradient_and_an_unused_output_none_either(device):
    linears = [linear(device, torch.float32, 16, 32, 4) for _ in range(2)]
    x = torch.randn(5, 32, device=device)
    first, _ = lora_linears(x, linears)
    first.sum().backward()
    assert linears[0].branches[0].B.grad is not None
    assert linears[1].branches[0].B.grad is None or not linears[1].branches[0].B.grad.any()
    assert not linears[1].branches[0].A.grad.any()


def test_gradients_of_adapters_are_kept_in_fp32_where_the_parameter_asks_for_it(device):
    each = linear(device, torch.float32, 16, 32, 4)
    narrow = FrozenLinear(
        each.weight, None, tuple(Branch(b.A.detach().half(), b.B.detach().half(), b.scale) for b in each.branches)
    )
    for branch in narrow.branches:
        for leaf in (branch.A, branch.B):
            leaf.requires_grad_()
            leaf.grad_dtype = torch.float32
    lora_linears(torch.randn(5, 32, device=device), [narrow])[0].square().sum().backward()
    grad = narrow.branches[0].B.grad
    assert grad.dtype == torch.float32
    assert not torch.equal(grad, grad.half().float())


def test_two_backward_passes_over_one_graph_add_up_and_strided_gradients_are_taken(device):
    each = linear(device, torch.float32, 16, 32, 4)
    x = torch.randn(5, 32, device=device, requires_grad=True)
    (y,) = lora_linears(x, [each])
    y.backward(torch.ones((), device=device).expand(5, 16), retain_graph=True)
    once = x.grad.clone()
    y.backward(torch.ones(16, 5, device=device).t())
    assert_close_fp32(x.grad, 2 * once)


def test_no_rows(device):
    each = linear(device, torch.float32, 16, 32, 4)
    x = torch.empty(0, 32, device=device, requires_grad=True)
    lora_linears(x, [each])[0].sum().backward()
    assert x.grad.shape == (0, 32)
    assert not each.branches[0].B.grad.any()


def test_wrong_shapes_and_types_are_refused_by_name(device):
    each = linear(device, torch.float32, 16, 32, 4)
    with pytest.raises(ValueError, match="x has 31 columns"):
        lora_linears(torch.zeros(2, 31, device=device), [each])
    with pytest.raises(ValueError, match=r"a weight is torch.float32"):
        lora_linears(torch.zeros(2, 32, device=device, dtype=torch.float16), [each])
    wrong = FrozenLinear(each.weight, None, (Branch(each.branches[0].A, each.branches[0].A, 1.0),))
    with pytest.raises(ValueError, match="no branch"):
        lora_linears(torch.zeros(2, 32, device=device), [wrong])


# ---- FP8


def test_rows_are_quantised_to_within_half_a_step_of_e4m3(device):
    x = torch.randn(7, 100, device=device) * torch.logspace(-3, 3, 7, device=device)[:, None]
    q, scale = fp8.quantise_rows(x)
    back = q.float() * scale
    step = torch.maximum(back.abs(), scale * 2**-6) * 2**-3  # three bits behind the point; subnormals below 2^-6
    assert ((back - x).abs() <= 0.5001 * step.clamp_min(1e-12) + scale * 2**-10).all()
    assert_close_fp32(back.abs().amax(-1), x.abs().amax(-1))
    zeros, _ = fp8.quantise_rows(torch.zeros(2, 16, device=device))
    assert not zeros.float().any()


class Fp8Product(torch.autograd.Function):
    """The product of e4m3 numbers and the gradient of its input, in the type of x, by the formula: rows of x and of dy rounded, each
    with the layout of the weight that its product reads."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        rows = fp8.quantise_rows_reference(x)
        return (rows.q.float() * rows.scale).to(x.dtype) @ weight.dequantised().to(x.dtype).t()

    @staticmethod
    def backward(ctx, dy):
        rows, columns = fp8.quantise_rows_reference(dy), ctx.weight.by_column.float() * ctx.weight.column_scale
        return (rows.q.float() * rows.scale).to(dy.dtype) @ columns.to(dy.dtype).t(), None


def test_an_fp8_linear_is_the_linear_of_its_quantised_numbers_and_its_branch_sees_the_plain_input(device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    each = linear(device, dtype, 32, 64, 4)
    quantised = FrozenLinear(fp8.quantise_weight(each.weight), None, each.branches)
    x = torch.randn(1024, 64, device=device).to(dtype)

    def formula(x, linears):
        (linear,) = linears
        (branch,) = linear.branches
        return (Fp8Product.apply(x, linear.weight) + (x @ branch.A.t() @ branch.B.t()) * branch.scale,)

    truth = run(formula, x.float(), as_fp32([quantised]))
    compare(lora_linears, formula, formula, x, [quantised])
    # how far e4m3 is from the weight and input as they are: no less than the formula says, and no more
    unquantised = run(lora_linears_reference, x.float(), as_fp32([each]))
    ours = run(lora_linears, x, [quantised])
    for got, formula_s, exact in zip(ours[:2], truth[:2], unquantised[:2], strict=True):
        error, expected = (float((t.float() - exact).norm() / exact.norm()) for t in (got, formula_s))
        assert error == pytest.approx(expected, rel=0.1)
        assert expected > torch.finfo(torch.bfloat16).eps  # three bits behind the point, not seven


def test_why_fp8_is_not_possible_is_said():
    weight = torch.zeros(32, 64)
    assert fp8.why_not(weight, (9, 0)) is None
    assert fp8.why_not(weight, None) is None
    assert "8.9" in fp8.why_not(weight, (8, 0))
    assert "multiples of 16" in fp8.why_not(torch.zeros(33, 64), (9, 0))
