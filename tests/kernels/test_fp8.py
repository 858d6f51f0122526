"""FP8 rows made by the kernel that makes the numbers: they are those of a pass of its own, and as near to the fp32 truth."""

import pytest
import torch

from rft.kernels import fp8
from rft.kernels.lora_linear import Branch, FrozenLinear, lora_gated_mlp, lora_linears
from rft.kernels.rms_norm import (
    _add_rms_norm_fp8,
    _rms_norm_fp8,
    add_rms_norm,
    add_rms_norm_fp8,
    rms_norm,
    rms_norm_fp8,
    rms_norm_reference,
)
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(5, 48), (3, 1000), (1, 17000)]


def kernel_rows(x):
    """Through the kernel, also where `quantise_rows` takes plain torch."""
    return fp8.Rows(*fp8._quantise_rows(x))


def back(rows):
    return rows.q.float() * rows.scale


def assert_rows_of(rows, plain, truth):
    """`rows` are what a pass over `plain` gives, and no further from `truth` than that pass in plain torch is."""
    own = fp8.quantise_rows(plain)
    assert rows.q.dtype == fp8.DTYPE
    assert torch.equal(rows.scale, own.scale)
    assert torch.equal(rows.q.float(), own.q.float())
    reference = fp8.quantise_rows_reference(plain)
    ours, theirs = ((back(r) - truth.float()) for r in (rows, reference))
    assert ours.abs().max() <= 2 * theirs.abs().max()
    assert ours.norm() <= 1.1 * theirs.norm() + 1e-4 * truth.float().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_pass_of_its_own_are_those_of_plain_torch(device, shape, dtype):
    x = (torch.randn(shape, device=device) * torch.logspace(-3, 3, shape[0], device=device)[:, None]).to(dtype)
    rows, reference = kernel_rows(x), fp8.quantise_rows_reference(x)
    assert_close_fp32(rows.scale, reference.scale, 1e-6)
    step = 2**-3 * torch.maximum(back(reference).abs(), reference.scale * 2**-6)
    assert ((back(rows) - back(reference)).abs() <= 1.001 * step).all()
    ours, theirs = ((back(r) - x.float()).norm() for r in (rows, reference))
    assert ours <= 1.001 * theirs
    strided = torch.stack([x, x + 1], dim=1)[:, 0]
    assert torch.equal(kernel_rows(strided).q.float(), rows.q.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [(0.0, True), (0.0, False), (1.0, False)], ids=["llama", "olmo", "gemma"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_the_norm_quantises_what_it_gives_and_its_gradients_stay(device, shape, form, dtype):
    offset, before = form
    x, residual = (torch.randn(2, *shape, device=device).to(dtype).requires_grad_() for _ in range(2))
    weight = (torch.randn(shape[-1], device=device) * 0.3 + 1).to(dtype).requires_grad_()
    given = {"offset": offset, "cast_before_weight": before}
    slope = torch.randn(2, *shape, device=device).to(dtype)
    runs = []
    for quantised in (False, True):
        for leaf in (x, residual, weight):
            leaf.grad = None
        call, call_add = (rms_norm_fp8, add_rms_norm_fp8) if quantised else (rms_norm, add_rms_norm)
        first = call(x, weight, 1e-5, **given)
        first, rows = first if quantised else (first, None)
        y, total, *more = call_add(first, residual, weight, 1e-5, **given)
        torch.autograd.backward((y, total), (slope, 2 * slope))
        runs.append((first, y, total, *(leaf.grad for leaf in (x, residual, weight))))
        if quantised:
            kept = rows, more[0]
    for own, plain in zip(runs[1], runs[0], strict=True):
        assert torch.equal(own, plain)
    truth = rms_norm_reference(x.detach().float(), weight.detach().float(), 1e-5, **given)
    assert_rows_of(kept[0], runs[0][0].detach().flatten(0, -2), truth.flatten(0, -2))
    plain_sum = (runs[0][0] + residual).detach()
    truth = rms_norm_reference(plain_sum.float(), weight.detach().float(), 1e-5, **given)
    assert_rows_of(kept[1], runs[0][1].detach().flatten(0, -2), truth.flatten(0, -2))
    assert not any(t.requires_grad for rows in kept for t in rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(40, 16), (48, 1000, 16)], ids=str)
def test_parts_side_by_side_are_quantised_under_one_scale(device, widths, dtype):
    parts = [torch.randn(5, 2 * n, device=device).to(dtype)[:, :n] * 10**i for i, n in enumerate(widths)]
    rows = fp8.Rows(*fp8._quantise_joined(*parts, *[None] * (3 - len(parts))))
    whole = kernel_rows(torch.cat(parts, dim=1))
    assert torch.equal(rows.scale, whole.scale)
    assert torch.equal(rows.q.float(), whole.q.float())
    assert torch.equal(fp8.quantise_joined(parts).scale, fp8.quantise_rows(torch.cat(parts, dim=1)).scale)
    empty = [p[:0] for p in parts]
    assert fp8.quantise_joined(empty).q.shape == (0, sum(widths))
    with pytest.raises(ValueError, match="1 tensors"):
        fp8.quantise_joined(parts[:1])


def test_a_weight_s_scales_are_those_with_the_smallest_error_of_a_row(device, monkeypatch):
    torch.manual_seed(0)
    weight = (torch.randn(48, 576, device=device) * torch.logspace(-6, 3, 48, device=device)[:, None]).bfloat16()
    weight[5] = 0
    monkeypatch.setattr(fp8, "SEARCHED", 7 * 576)  # in pieces, the last of which is shorter
    found, plain = fp8.closest_rows(weight), fp8.quantise_rows_reference(weight)

    def errors(rows: fp8.Rows) -> torch.Tensor:
        return (rows.q.float() * rows.scale - weight.float()).square().sum(1)

    assert (errors(found) <= errors(plain)).all()
    share = errors(found).div(errors(plain)).nanmean()
    assert 0.8 < share < 0.97, "e4m3 is a floating-point format: there is little to find, and some"
    octave = found.scale / plain.scale
    assert (octave >= 1).all()
    assert (octave < 2).all()
    for i in range(fp8.SCALES):  # no other scale of those is better
        scale = plain.scale * 2.0 ** (i / fp8.SCALES)
        q = (weight.float() / scale).clamp(-fp8.LARGEST, fp8.LARGEST).to(fp8.DTYPE)
        assert (errors(found) <= errors(fp8.Rows(q, scale)) * (1 + 1e-6)).all()
    assert not found.q[5].float().any()
    weight[7, 3] = float("nan")
    broken = fp8.closest_rows(weight)
    assert broken.q[7].float().isnan().any()
    assert torch.equal(broken.scale[8:], found.scale[8:])
    assert fp8.closest_rows(weight[:0]).q.shape == (0, 576)


def test_columns_are_joined_where_they_lie_side_by_side_and_not_where_one_was_copied(device):
    weights = [torch.randn(n, 32, device=device) for n in (48, 16, 16)]
    joined = fp8.quantise_weights(weights)
    columns = fp8.joined_columns(joined)
    assert torch.equal(columns.float(), torch.cat([w.by_column.float() for w in joined], dim=1))
    for own, weight in zip(joined, weights, strict=True):
        assert torch.equal(own.by_row.float(), fp8.quantise_weight(weight).by_row.float())
        assert_close_fp32(own.by_column.float() * own.column_scale, weight.t(), 4e-2)
    assert fp8.joined_columns(joined[:2]) is None  # a product over two of three would read the third's neighbours
    assert fp8.joined_columns([joined[1], joined[0], joined[2]]) is None
    assert fp8.joined_columns([joined[0], joined[1]._replace(by_column=joined[1].by_column.clone()), joined[2]]) is None
    assert fp8.joined_columns([fp8.quantise_weight(w) for w in weights]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_an_input_that_three_linears_read_is_one_product(device, dtype, monkeypatch):
    weights = [torch.randn(n, 32, device=device).to(dtype) * 32**-0.5 for n in (48, 16, 16)]
    x = torch.randn(64, 32, device=device).to(dtype)
    slopes = [torch.randn(64, w.shape[0], device=device).to(dtype) for w in weights]
    calls = []
    plain = fp8.product_back
    monkeypatch.setattr(fp8, "product_back", lambda *given: calls.append(given[2].shape) or plain(*given))
    held = fp8.quantise_weights(weights)
    runs = []
    for copied in (False, True):
        each = [w._replace(by_column=w.by_column.clone()) for w in held] if copied else held
        leaf = x.clone().requires_grad_()
        torch.autograd.backward(lora_linears(leaf, [FrozenLinear(w) for w in each]), slopes)
        runs.append(leaf.grad)
    assert calls == [(32, 80), (32, 48), (32, 16), (32, 16)]
    truth = sum(s.float() @ w.float() for s, w in zip(slopes, weights, strict=True))
    one, three = (float((g.float() - truth).norm() / truth.norm()) for g in runs)
    rows = [fp8.quantise_rows_reference(s) for s in slopes]
    by_formula = sum(
        (r.q.float() * r.scale) @ (w.by_column.float() * w.column_scale).t() for r, w in zip(rows, held, strict=True)
    )
    expected = float((by_formula - truth).norm() / truth.norm())
    assert three == pytest.approx(expected, rel=0.1)
    assert one < 1.1 * three + 1e-4


def test_rows_without_a_number_and_rows_of_zeros(device):
    weight = torch.ones(16, device=device)
    y, rows = rms_norm_fp8(torch.zeros(0, 16, device=device), weight)
    assert (y.shape, rows.q.shape, rows.scale.shape) == ((0, 16), (0, 16), (0, 1))
    _, rows = rms_norm_fp8(torch.zeros(2, 16, device=device), weight)
    assert not back(rows).any()


def mlp(device, dtype, r, frozen):
    def draw(*shape):
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)

    torch.manual_seed(1)
    sizes = ((96, 32), (96, 32), (32, 96))
    weights = [draw(*size) for size in sizes]
    branches = [(Branch(draw(r, K).requires_grad_(), draw(N, r).requires_grad_(), 0.7),) if r else () for N, K in sizes]
    if frozen == "fp8":
        weights = [*fp8.quantise_weights(weights[:2]), fp8.quantise_weight(weights[2])]
    return [FrozenLinear(w, None, b) for w, b in zip(weights, branches, strict=True)]


ROWS = {torch.float32: 48, torch.bfloat16: 2048}
"""Rounding errors are compared in bf16: many of them."""


def straight_through(t):
    """What a product in FP8 sees of t, with the gradient of t."""
    rows = fp8.quantise_rows_reference(t.detach().flatten(0, -2))
    return t + (back(rows).view(t.shape) - t).detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("r", [4, 0])
def test_an_mlp_given_quantised_rows_is_the_mlp_that_quantises_them_itself_and_near_the_unquantised_one(
    device, r, dtype
):
    x = torch.randn(3, 16, 32, device=device).to(dtype)
    slope = torch.randn(3, 16, 32, device=device).to(dtype)
    runs = []
    for frozen, quantised in (("fp8", None), ("fp8", fp8.quantise_rows(x.flatten(0, -2))), ("plain", None)):
        linears = mlp(device, dtype, r, frozen)
        leaf = x.clone().requires_grad_()
        y = lora_gated_mlp(leaf, *linears, quantised=quantised)
        y.backward(slope)
        runs.append([y.detach(), leaf.grad, *(t.grad for each in linears for b in each.branches for t in b[:2])])
    for own, plain in zip(runs[1], runs[0], strict=True):
        assert torch.equal(own, plain)
    for own, plain in zip(runs[1], runs[2], strict=True):
        cosine = torch.nn.functional.cosine_similarity(own.float().flatten(), plain.float().flatten(), dim=0)
        assert cosine >= 0.99  # BO-35


def test_the_mlp_in_fp8_is_its_own_formula_in_fp32(device):
    """Every rounding to e4m3 where the op makes it, everything else in fp32 torch: outputs alike, and gradients of the adapters."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    gate, up, down = mlp(device, dtype, 4, "fp8")
    x, slope = torch.randn(2, ROWS[dtype], 32, device=device).to(dtype)

    def formula(kind):
        """In `kind`: with fp32 the truth, else plain torch in the same type."""
        copies = [[Branch(*(t.detach().to(kind).requires_grad_() for t in b[:2]), b.scale) for b in each.branches] for each in (gate, up, down)]  # fmt: skip

        def apply(t, linear, branches):
            y = straight_through(t.float()).to(kind) @ linear.weight.dequantised().to(kind).t()
            for b in branches:
                y = y + b.scale * (t @ b.A.t()) @ b.B.t()
            return y

        t = x.to(kind)
        g, u = apply(t, gate, copies[0]), apply(t, up, copies[1])
        y = apply(torch.nn.functional.silu(g) * u, down, copies[2])
        y.backward(slope.to(kind))
        return [y.detach(), *(leaf.grad for leaf in copies[2][0][:2])]

    y = lora_gated_mlp(x, gate, up, down)
    y.backward(slope)
    ours = [y.detach(), *(t.grad for t in down.branches[0][:2])]
    for own, plain, truth in zip(ours, formula(dtype), formula(torch.float32), strict=True):
        assert_no_worse(own.to(plain.dtype), plain, truth)


def test_registered_ops_pass_opcheck(device):
    x, residual = torch.randn(2, 4, 48, device=device).unbind()
    weight = torch.rand(48, device=device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_rms_norm_fp8.op, (x, weight, 1e-5, 0.0, True), test_utils=checks)
    torch.library.opcheck(_add_rms_norm_fp8.op, (x, residual, weight, 1e-5, 0.0, True), test_utils=checks)
    torch.library.opcheck(fp8._quantise_joined.op, (x, residual, None), test_utils=checks)
    torch.library.opcheck(fp8._quantise_rows.op, (x,), test_utils=checks)


@pytest.mark.gpu
def test_the_last_row_past_2_to_the_31_equals_the_same_row_alone(device):
    M, N = 131080, 16384
    x = torch.empty(M, N, dtype=torch.bfloat16, device=device).normal_()
    rows, alone = fp8.quantise_rows(x), fp8.quantise_rows(x[-1:])
    assert torch.equal(rows.q[-1:].float(), alone.q.float())
    assert torch.equal(rows.scale[-1:], alone.scale)
    joined = fp8.quantise_joined([x[:, :8192], x[:, 8192:]])
    assert torch.equal(joined.q[-1:].float(), alone.q.float())


@pytest.mark.gpu
def test_the_host_never_waits_and_joined_products_can_be_captured(device):
    held = fp8.quantise_weights([torch.randn(n, 256, device=device).bfloat16() for n in (512, 128, 128)])
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
    weight = torch.rand(256, device=device).bfloat16()

    def step():
        leaf = x.clone().requires_grad_()
        y, rows = rms_norm_fp8(leaf, weight)
        outs = lora_linears(y, [FrozenLinear(w) for w in held], rows)
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
        return leaf.grad

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert torch.equal(captured, expected)
