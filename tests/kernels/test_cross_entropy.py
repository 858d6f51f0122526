import pytest
import torch

from rft.kernels.cross_entropy import _cross_entropy, cross_entropy, cross_entropy_reference
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
OPTIONS = [
    {},
    {"scale": 0.5, "softcap": 3.0},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"label_smoothing": 0.1, "scale": 2.0, "softcap": 5.0, "z_loss": 1e-2},
]


def make(device, M=7, V=301, dtype=torch.float32, spread=4.0):
    logits = (torch.randn(M, V, device=device) * spread).to(dtype)
    labels = torch.randint(V, (M,), device=device)
    labels[1 % M] = -100
    return logits, labels


def loss_and_gradient(function, logits, labels, upstream, **options):
    logits = logits.detach().requires_grad_()
    loss = function(logits, labels, **options)
    loss.backward(upstream)
    return loss.detach(), logits.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 301), (3, 20011)], ids=str)
def test_loss_and_gradient_of_each_row_match_the_reference(device, shape, options, dtype):
    logits, labels = make(device, *shape, dtype)
    upstream = torch.rand(shape[0], device=device)
    options = {**options, "token_weight": torch.rand(shape[0], device=device)}
    truth = loss_and_gradient(cross_entropy_reference, logits.float(), labels, upstream, **options)
    got = loss_and_gradient(cross_entropy, logits, labels, upstream, **options)
    plain = loss_and_gradient(cross_entropy_reference, logits, labels, upstream, **options)
    assert_close_fp32(got[0], truth[0], what="loss")
    assert_no_worse(got[1], plain[1], truth[1], what="gradient")


def test_a_row_without_label_has_loss_and_gradient_zero_even_when_its_logits_are_nan(device):
    logits, labels = make(device)
    logits[1] = float("nan")
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, torch.ones(7, device=device))
    assert loss[1] == 0
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    assert torch.isfinite(gradient).all()


def test_masked_out_logits_of_minus_infinity_have_probability_zero(device):
    logits, labels = make(device, V=9000)
    labels.fill_(8999)
    logits[:, :8500] = float("-inf")
    truth = loss_and_gradient(cross_entropy_reference, logits, labels, torch.ones(7, device=device))
    got = loss_and_gradient(cross_entropy, logits, labels, torch.ones(7, device=device))
    assert_close_fp32(got[0], truth[0])
    assert_close_fp32(got[1], truth[1])


def test_logits_that_grow_along_the_row_do_not_overflow(device):
    logits = torch.linspace(-500, 500, 30000, device=device).repeat(2, 1)
    labels = torch.tensor([29999, 29000], device=device)
    truth = loss_and_gradient(cross_entropy_reference, logits, labels, torch.ones(2, device=device))
    got = loss_and_gradient(cross_entropy, logits, labels, torch.ones(2, device=device))
    assert_close_fp32(got[0], truth[0])
    assert_close_fp32(got[1], truth[1])


@pytest.mark.parametrize("label", [-1, 301, 10**9])
def test_a_label_outside_the_vocabulary_makes_its_own_loss_nan_and_no_other(device, label):
    logits, labels = make(device)
    labels[3] = label
    loss = cross_entropy(logits, labels)
    assert loss.isnan().tolist() == [False, False, False, True, False, False, False]


def test_strided_logits_and_expanded_upstream_give_the_same_as_contiguous_ones(device):
    logits, labels = make(device, 6, 300)
    wide = torch.randn(6, 640, device=device)
    wide[:, 100:400] = logits
    upstream = torch.full((), 0.25, device=device)
    expected = loss_and_gradient(cross_entropy, logits, labels, upstream.repeat(6))
    for view in (wide[:, 100:400], logits.t().contiguous().t()):
        got = loss_and_gradient(cross_entropy, view, labels, upstream.expand(6))
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_backward_twice_over_one_graph_adds_the_same_gradient(device):
    logits, labels = make(device)
    logits.requires_grad_()
    loss = cross_entropy(logits, labels).sum()
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)


def test_no_rows_give_no_losses(device):
    loss = cross_entropy(
        torch.empty(0, 50, device=device, requires_grad=True), torch.empty(0, dtype=torch.long, device=device)
    )
    assert loss.shape == (0,)
    loss.sum().backward()


def test_wrong_shapes_are_refused_by_name(device):
    with pytest.raises(ValueError, match="need labels"):
        cross_entropy(torch.zeros(3, 5, device=device), torch.zeros(4, dtype=torch.long, device=device))
    with pytest.raises(ValueError, match="token_weight"):
        cross_entropy(
            torch.zeros(3, 5, device=device),
            torch.zeros(3, dtype=torch.long, device=device),
            token_weight=torch.ones(2, device=device),
        )


def test_the_registered_op_passes_opcheck(device):
    logits, labels = make(device)
    args = (logits.requires_grad_(), labels, None, 1.0, 0.0, -100, 0.0, 0.0)
    torch.library.opcheck(_cross_entropy, args)


@pytest.mark.gpu
def test_the_last_row_past_2_to_the_31_equals_the_same_row_alone(device):
    """BO-22: 16,400 rows of 131,072 are 2,149,580,800 elements."""
    M, V = 16400, 131072
    logits = torch.empty(M, V, dtype=torch.bfloat16, device=device).normal_()
    labels = torch.randint(V, (M,), device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, torch.ones(M, device=device))
    assert torch.cuda.max_memory_allocated() - before < 1.01 * logits.nbytes  # the gradient; no copy in fp32
    alone = loss_and_gradient(cross_entropy, logits[-1:], labels[-1:], torch.ones(1, device=device))
    assert torch.equal(loss[-1:], alone[0])
    assert torch.equal(gradient[-1:], alone[1])
    assert gradient[-1].abs().sum() > 0
