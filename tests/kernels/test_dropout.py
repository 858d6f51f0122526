"""Masks that are drawn where they are needed: their distribution, that both passes see the same, and that layers computed again do."""

import pytest
import torch

from rft.kernels.dropout import add_dropped, draw_seeds, dropped
from rft.kernels.lora_linear import Branch, FrozenLinear, lora_gated_mlp, lora_linears
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
P = 0.25


def seeds_of(device, number=2):
    torch.manual_seed(5)
    return draw_seeds(number, device)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_elements_are_zero_with_the_asked_probability_and_else_scaled(device, p):
    rows, columns = 64, 4100
    ones = torch.ones(rows, columns, device=device)
    seeds = seeds_of(device)
    y = dropped(ones, seeds, 0, p)
    zero = y == 0
    assert_close_fp32(y[~zero], torch.full_like(y[~zero], 1 / (1 - p)), 1e-6)
    n = zero.numel()
    assert abs(float(zero.sum()) - p * n) < 5 * (n * p * (1 - p)) ** 0.5
    for share, each in ((zero.float().mean(0), rows), (zero.float().mean(1), columns)):  # no row and no column is odd
        assert (share - p).abs().max() < 7 * (p * (1 - p) / each) ** 0.5
    for other in (dropped(ones, seeds, 1, p) == 0, zero.roll(1, 0), zero.roll(1, 1), zero.roll(512, 1)):
        both = float((zero & other).sum())
        assert abs(both - p * p * n) < 6 * (n * p * p) ** 0.5  # as often together as by chance


def test_the_mask_depends_on_the_seed_and_the_place_alone(device):
    x = torch.randn(6, 300, device=device)
    seeds = seeds_of(device)
    y = dropped(x, seeds, 1, P)
    assert torch.equal(dropped(x, seeds, 1, P), y)
    assert not torch.equal(dropped(x, seeds, 0, P), y)
    assert torch.equal(dropped(torch.stack([x, x], 1)[:, 0], seeds, 1, P), y)
    assert torch.equal(dropped(x[:3], seeds, 1, P), y[:3])
    total = torch.randn(6, 900, device=device)[:, ::3].contiguous()
    assert_close_fp32(add_dropped(total.clone(), x, seeds, 1, P), total + y, 1e-6)
    wide = torch.zeros(6, 400, device=device)
    add_dropped(wide[:, 50:350], x, seeds, 1, P)
    assert torch.equal(wide[:, 50:350], y)
    assert not wide[:, :50].any()
    assert dropped(x[:0], seeds, 0, P).shape == (0, 300)


def test_seeds_come_from_the_generator_whose_state_is_kept(device):
    first, again = seeds_of(device), seeds_of(device)
    assert torch.equal(first, again)
    assert not torch.equal(draw_seeds(2, device), first)
    assert first[0] != first[1]


def linear(device, dtype, N, K, *branches):
    def draw(*shape):
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)

    made = tuple(Branch(draw(r, K).requires_grad_(), draw(N, r).requires_grad_(), 0.5, p) for r, p in branches)
    return FrozenLinear(draw(N, K), None, made)


def with_masks(x, linears, masks, kind):
    """What `lora_linears` is, with these masks of its branches, in `kind`; gives the outputs and the copies of A and B."""
    masks = iter(masks)
    outs, copies = [], []
    for each in linears:
        y = x @ each.weight.to(kind).t()
        for branch in each.branches:
            A, B = (t.detach().to(kind).requires_grad_() for t in branch[:2])
            copies += [A, B]
            y = y + branch.scale * ((x * next(masks).to(kind)) @ A.t()) @ B.t()
        outs.append(y)
    return outs, copies


def masks_of(linears, rows, device):
    """Those that the op draws next from the generator as it stands."""
    branches = [b for each in linears for b in each.branches]
    seeds = draw_seeds(len(branches), device)
    return [
        dropped(torch.ones(rows, b.A.shape[1], device=device), seeds, i, b.dropout)
        if b.dropout
        else torch.ones(1, 1, device=device)
        for i, b in enumerate(branches)
    ]


def gradients(outs, slopes, leaves):
    torch.autograd.backward(outs, [s.to(y) for s, y in zip(slopes, outs, strict=True)])
    return [*(y.detach() for y in outs), *(leaf.grad for leaf in leaves)]


def compare(own, plain, truth):
    for o, p, t in zip(own, plain, truth, strict=True):
        assert_no_worse(o.to(p.dtype), p, t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "branches", [[((4, P),)], [((4, P), (6, 0.5)), (), ((4, 0.0),)]], ids=["one", "two adapters, none, without dropout"]
)
def test_outputs_and_gradients_are_those_of_the_same_masks_in_plain_torch(device, branches, dtype):
    rows, width = (19, 64) if dtype == torch.float32 else (1000, 512)  # rounding errors are compared: many of them
    linears = [linear(device, dtype, width // 2 + 16 * i, width, *each) for i, each in enumerate(branches)]
    x = torch.randn(rows, width, device=device).to(dtype)
    slopes = [torch.randn(rows, each.weight.shape[0], device=device) for each in linears]
    torch.manual_seed(5)
    masks = masks_of(linears, rows, device)
    runs = []
    for kind in (dtype, torch.float32):
        leaf = x.to(kind, copy=True).requires_grad_()
        outs, copies = with_masks(leaf, linears, masks, kind)
        runs.append(gradients(outs, slopes, [leaf, *copies]))
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    outs = lora_linears(leaf, linears)
    compare(gradients(outs, slopes, [leaf, *(t for each in linears for b in each.branches for t in b[:2])]), *runs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_mlp_drops_the_input_of_down_too(device, dtype):
    rows, width, inner = (17, 32, 96) if dtype == torch.float32 else (1000, 256, 768)
    gate, up, down = (linear(device, dtype, *s, (4, P)) for s in ((inner, width), (inner, width), (width, inner)))
    x = torch.randn(rows, width, device=device).to(dtype)
    slope = [torch.randn(rows, width, device=device)]
    torch.manual_seed(5)
    masks = [masks_of((gate, up), rows, device), masks_of((down,), rows, device)]
    runs = []
    for kind in (dtype, torch.float32):
        leaf = x.to(kind, copy=True).requires_grad_()
        (g, u), copies = with_masks(leaf, (gate, up), masks[0], kind)
        outs, more = with_masks(torch.nn.functional.silu(g) * u, (down,), masks[1], kind)
        runs.append(gradients(outs, slope, [leaf, *copies, *more]))
    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    y = lora_gated_mlp(leaf, gate, up, down)
    compare(
        gradients((y,), slope, [leaf, *(t for each in (gate, up, down) for b in each.branches for t in b[:2])]), *runs
    )


def test_a_second_backward_pass_sees_the_masks_of_the_first(device):
    each = linear(device, torch.float32, 16, 32, (4, P))
    x = torch.randn(5, 32, device=device, requires_grad=True)
    (y,) = lora_linears(x, [each])
    slope = torch.randn(5, 16, device=device)
    y.backward(slope, retain_graph=True)
    once = [x.grad.clone(), each.branches[0].A.grad.clone()]
    torch.manual_seed(99)  # the generator has gone on
    y.backward(slope)
    for got, first in zip((x.grad, each.branches[0].A.grad), once, strict=True):
        assert torch.equal(got, 2 * first)
