import pytest
import torch

from rft.kernels import linear_cross_entropy as module
from rft.kernels import logit_blocks
from rft.kernels.linear_cross_entropy import (
    _linear_cross_entropy,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    plan_chunks,
)
from support.close import assert_close_fp32, assert_no_worse

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
OPTIONS = [
    {},
    {"scale": 0.5, "softcap": 3.0, "z_loss": 1e-2},
    {"label_smoothing": 0.1, "z_loss": 1e-2},
    {"label_smoothing": 0.1, "scale": 2.0, "softcap": 5.0},
]
M, H, V = 12, 24, 2100  # two blocks of columns at the least block of 1024


def make(device, M=M, H=H, V=V, dtype=torch.float32):
    hidden = torch.randn(M, H, device=device).to(dtype)
    weight = (torch.randn(V, H, device=device) * 0.5).to(dtype)
    labels = torch.randint(V, (M,), device=device)
    labels[1], labels[4] = -100, -100
    return hidden, weight, labels


def reference_sum(hidden, weight, labels, **options):
    return linear_cross_entropy_reference(hidden, weight, labels, **options).sum()


def plain_sum(hidden, weight, labels, **options):
    """As `reference_sum`, with the product in the dtype of the inputs, as eager torch has it."""
    logits = torch.nn.functional.linear(hidden, weight, options.pop("bias", None))
    return module.rows.cross_entropy_reference(logits, labels, **options).sum()


def run(function, hidden, weight, labels, *, train_weight, upstream=1.0, bias=None, **options):
    """(loss, gradients of hidden, weight, bias that exist)."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(train_weight)
    if bias is not None:
        options["bias"] = bias = bias.detach().requires_grad_(train_weight)
    loss = function(hidden, weight, labels, **options)
    (loss * upstream).backward()
    return loss.detach(), *(t.grad for t in (hidden, weight, bias) if t is not None and t.requires_grad)


def check(got, plain, truth):
    assert_close_fp32(got[0], truth[0], 1e-5 if got[1].dtype == torch.float32 else 2e-3, what="loss")
    for name, g, p, t in zip(("hidden", "weight", "bias"), got[1:], plain[1:], truth[1:], strict=False):
        assert_no_worse(g, p, t, what=f"gradient of {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk_rows", ["auto", "least", 5], ids=str)
def test_sum_and_every_gradient_match_the_reference(device, chunk_rows, options, train_weight, dtype, monkeypatch):
    monkeypatch.setattr(module, "MIB", 1 << 8)  # small budgets: several blocks of columns
    hidden, weight, labels = make(device, dtype=dtype)
    options = {**options, "token_weight": torch.rand(M, device=device), "bias": torch.randn(V, device=device).to(dtype)}
    kind = {"train_weight": train_weight, "upstream": 0.3}
    options_of_ours = {"reduction": "sum", "chunk_rows": chunk_rows, "expected_upstream": 0.3}
    truth = run(
        reference_sum, hidden.float(), weight.float(), labels, **kind, **{**options, "bias": options["bias"].float()}
    )
    plain = run(plain_sum, hidden, weight, labels, **kind, **options)
    got = run(linear_cross_entropy, hidden, weight, labels, **kind, **options, **options_of_ours)
    check(got, plain, truth)


@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
@pytest.mark.parametrize("chunk_rows", ["auto", "least"])
def test_rows_without_label_are_dropped_and_even_nan_in_them_reaches_no_gradient(
    device, train_weight, chunk_rows, monkeypatch
):
    monkeypatch.setattr(logit_blocks, "ROW_BUCKET", 4)
    hidden, weight, labels = make(device, M=23)
    labels[:3], labels[15:] = -100, -100
    token_weight = torch.rand(23, device=device)
    num_labels = int((labels != -100).sum())
    truth = run(reference_sum, hidden, weight, labels, train_weight=train_weight, token_weight=token_weight)
    hidden[labels == -100] = float("nan")
    options = {"num_labels": num_labels, "reduction": "sum", "token_weight": token_weight, "chunk_rows": chunk_rows}
    got = run(linear_cross_entropy, hidden, weight, labels, train_weight=train_weight, **options)
    check(got, truth, truth)
    assert got[1][labels == -100].abs().max() == 0


def test_more_labels_than_the_caller_counted_make_the_loss_nan(device, monkeypatch):
    monkeypatch.setattr(logit_blocks, "ROW_BUCKET", 4)
    hidden, weight, labels = make(device)
    assert linear_cross_entropy(hidden, weight, labels, num_labels=8).isnan()
    assert not linear_cross_entropy(hidden, weight, labels, num_labels=10).isnan()


@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
@pytest.mark.parametrize("num_labels", [None, 0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_label_at_all_gives_loss_and_gradients_of_zero(device, reduction, num_labels, train_weight):
    hidden, weight, labels = make(device)
    labels.fill_(-100)
    for grad in run(
        linear_cross_entropy,
        hidden,
        weight,
        labels,
        train_weight=train_weight,
        num_labels=num_labels,
        reduction=reduction,
    ):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_micro_batches_over_one_count_add_up_to_the_whole_batch(device):
    """Uneven numbers of labels, `num_items` on the device."""
    hidden, weight, labels = make(device)
    labels[6:] = -100
    num_items = (labels != -100).sum()
    whole = run(linear_cross_entropy, hidden, weight, labels, train_weight=True)
    parts = [
        run(linear_cross_entropy, hidden[part], weight, labels[part], train_weight=True, num_items=num_items)
        for part in (slice(0, 5), slice(5, 12))
    ]
    assert_close_fp32(parts[0][0] + parts[1][0], whole[0])
    assert_close_fp32(torch.cat([parts[0][1], parts[1][1]]), whole[1])
    assert_close_fp32(parts[0][2] + parts[1][2], whole[2])


def test_reduction_none_takes_an_upstream_gradient_per_row(device):
    hidden, weight, labels = make(device)
    upstream = torch.rand(M, device=device)
    truth = run(
        lambda *a: (linear_cross_entropy_reference(*a, z_loss=1e-2) * upstream).sum(),
        hidden,
        weight,
        labels,
        train_weight=True,
    )
    got = run(
        lambda *a: (linear_cross_entropy(*a, z_loss=1e-2, reduction="none") * upstream).sum(),
        hidden,
        weight,
        labels,
        train_weight=True,
    )
    check(got, truth, truth)
    with pytest.raises(ValueError, match="label_smoothing"):
        linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, reduction="none")


def test_strided_three_dimensional_hidden_states_and_a_transposed_head_give_the_same(device):
    hidden, weight, labels = make(device)
    expected = run(linear_cross_entropy, hidden, weight, labels, train_weight=True)
    wide = torch.randn(3, 4, 2 * H, device=device)
    wide[..., H:] = hidden.view(3, 4, H)
    got = run(linear_cross_entropy, wide[..., H:], weight.t().contiguous().t(), labels.view(3, 4), train_weight=True)
    for g, e in zip(got, expected, strict=True):
        assert_close_fp32(g.reshape(e.shape), e)


def test_logits_that_grow_from_block_to_block_rescale_what_was_summed(device):
    """Every block's maximum passes the one before by more than e^40: the sums are rescaled each time, without overflow."""
    hidden = torch.ones(4, 1, device=device)
    weight = (torch.arange(4096, device=device).float() // 1024 * 60.0 + torch.rand(4096, device=device))[:, None]
    labels = torch.tensor([5, 1500, 4000, -100], device=device)
    truth = run(reference_sum, hidden, weight, labels, train_weight=False)
    got = _blocks_of_1024(hidden, weight, labels)
    assert_close_fp32(got[0], truth[0])
    assert_close_fp32(got[1], truth[1])


def _blocks_of_1024(hidden, weight, labels):
    out = _linear_cross_entropy(
        hidden, weight, labels, None, None, None, None, None, 1.0, 0.0, -100, 0.0, 0.0, 4, 1024, True, False, False
    )
    return out[0], out[2]


@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
def test_an_upstream_gradient_other_than_the_expected_one_is_right_too(device, train_weight):
    hidden, weight, labels = make(device)
    options = {"train_weight": train_weight, "reduction": "sum"}
    expected = run(linear_cross_entropy, hidden, weight, labels, **options, upstream=0.25)
    for kept in ({}, {"num_labels": M - 2}):
        got = run(linear_cross_entropy, hidden, weight, labels, **options, **kept, upstream=0.25, expected_upstream=0.7)
        for g, e in zip(got, expected, strict=True):
            assert_close_fp32(g, e)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_rows", ["auto", "least"])
def test_the_gradient_of_a_row_that_is_almost_sure_is_right(device, chunk_rows, dtype):
    """Its 1 - p must not drown in a p rounded to bf16."""
    weight = torch.nn.functional.normalize(torch.randn(2100, 64, device=device), dim=-1).to(dtype)
    labels = torch.arange(64, device=device)
    hidden = (weight[:64] * 14.0).to(dtype)
    truth = run(reference_sum, hidden.float(), weight.float(), labels, train_weight=False)
    plain = run(plain_sum, hidden, weight, labels, train_weight=False)
    got = run(linear_cross_entropy, hidden, weight, labels, train_weight=False, reduction="sum", chunk_rows=chunk_rows)
    assert truth[0] < 0.2 * 64
    if dtype == torch.float32:  # the reference itself loses as much in 1 - p
        assert_close_fp32(got[1], truth[1], 1e-4)
    else:
        assert_no_worse(got[1], plain[1], truth[1])


def test_a_second_backward_raises_instead_of_scaling_twice(device):
    hidden, weight, labels = make(device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        loss.backward()


def test_without_gradients_only_the_loss_is_computed(device):
    hidden, weight, labels = make(device)
    expected = reference_sum(hidden, weight, labels)
    with torch.no_grad():
        got = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels, reduction="sum")
    assert_close_fp32(got, expected)
    assert not got.requires_grad


def test_tied_weight_gets_the_gradients_of_embedding_and_head(device):
    _, weight, labels = make(device)
    ids = torch.randint(V, (M,), device=device)
    grads = []
    for function in (linear_cross_entropy, lambda h, w, y: reference_sum(h, w, y) / 10):
        tied = weight.detach().requires_grad_()
        function(torch.nn.functional.embedding(ids, tied), tied, labels).backward()
        grads.append(tied.grad)
    assert_close_fp32(grads[0], grads[1])


def test_a_label_outside_the_vocabulary_makes_the_loss_nan(device):
    hidden, weight, labels = make(device)
    labels[2] = V
    for train_weight in (False, True):
        assert run(linear_cross_entropy, hidden, weight, labels, train_weight=train_weight)[0].isnan()


def test_wrong_shapes_are_refused_by_name(device):
    hidden, weight, labels = make(device)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, labels[:5])
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden[:, :5], weight, labels)
    with pytest.raises(ValueError, match="bias"):
        linear_cross_entropy(hidden, weight, labels, bias=torch.zeros(3, device=device))


@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
def test_the_registered_op_passes_opcheck(device, train_weight):
    hidden, weight, labels = make(device)
    args = (
        hidden.requires_grad_(), weight.requires_grad_(train_weight), labels, None, None, None, None, None,
        1.0, 0.0, -100, 0.0, 0.0, M, 0 if train_weight else 1024, True, train_weight, False,
    )  # fmt: skip
    # Not test_aot_dispatch_dynamic: it returns the gradients from the graph, which backward scales in place; only the loss ever
    # leaves linear_cross_entropy, and the next test compiles that.
    torch.library.opcheck(
        _linear_cross_entropy, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
def test_it_compiles_into_one_graph_and_gives_the_same(device, train_weight):
    hidden, weight, labels = make(device)
    expected = run(linear_cross_entropy, hidden, weight, labels, train_weight=train_weight, upstream=0.5)
    compiled = torch.compile(
        linear_cross_entropy, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor"
    )
    got = run(compiled, hidden, weight, labels, train_weight=train_weight, upstream=0.5)
    for g, e in zip(got, expected, strict=True):
        assert_close_fp32(g, e)


def test_least_memory_keeps_logits_and_sums_within_32_mib():
    for H, V in ((2048, 128256), (4096, 128256), (5120, 151936), (8192, 262144)):
        rows, columns = plan_chunks("least", 8192, H, V, 2, whole_rows=False)
        assert rows * H * 4 + rows * columns * 2 <= 32 << 20
        assert columns >= 4096


@pytest.mark.gpu
@pytest.mark.parametrize("train_weight", [False, True], ids=["frozen", "full"])
def test_the_host_never_waits_and_the_step_can_be_captured(device, train_weight):
    hidden, weight, labels = make(device, M=512, H=256, V=5000, dtype=torch.bfloat16)
    labels[300:] = -100
    options = {"train_weight": train_weight, "num_labels": 298, "reduction": "sum"}
    expected = run(linear_cross_entropy, hidden, weight, labels, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(linear_cross_entropy, hidden, weight, labels, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(linear_cross_entropy, hidden, weight, labels, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(linear_cross_entropy, hidden, weight, labels, **options)
    graph.replay()
    for got, wanted in zip(captured, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_least_memory_takes_under_a_tenth_of_a_gib_at_8b_shapes(device):
    hidden, weight, labels = make(device, M=8192, H=4096, V=128256, dtype=torch.bfloat16)
    run(linear_cross_entropy, hidden, weight, labels, train_weight=False, chunk_rows="least")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(linear_cross_entropy, hidden, weight, labels, train_weight=False, chunk_rows="least")
    assert torch.cuda.max_memory_allocated() - before <= 0.1 * 2**30  # the gradient of hidden, 64 MiB, included


@pytest.mark.gpu
def test_a_chunk_of_more_than_2_to_the_31_logits_equals_smaller_chunks(device):
    hidden, weight, labels = make(device, M=16640, H=64, V=131072, dtype=torch.bfloat16)
    options = {"train_weight": True, "reduction": "sum"}
    whole = run(linear_cross_entropy, hidden, weight, labels, **options, chunk_rows=16640)
    parts = run(linear_cross_entropy, hidden, weight, labels, **options, chunk_rows=4096)
    assert_close_fp32(whole[0], parts[0])
    assert_close_fp32(whole[1], parts[1], 2e-3)  # cuBLAS adds up another way for another number of rows
    assert_close_fp32(whole[2], parts[2], 5e-3)
    assert_close_fp32(whole[1][-1], parts[1][-1], 1e-2)


@pytest.mark.gpu
def test_repeats_are_bit_equal(device):
    hidden, weight, labels = make(device, M=700, H=512, V=20001, dtype=torch.bfloat16)
    first = run(linear_cross_entropy, hidden, weight, labels, train_weight=True, num_labels=698)
    for _ in range(3):
        for a, b in zip(
            first, run(linear_cross_entropy, hidden, weight, labels, train_weight=True, num_labels=698), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_fp32_activations_into_a_bf16_head_and_autocast(device):
    hidden, weight, labels = make(device)
    got = run(linear_cross_entropy, hidden, weight.bfloat16(), labels, train_weight=True)
    assert got[1].dtype == torch.float32
    assert got[2].dtype == torch.bfloat16
    expected = run(linear_cross_entropy, hidden.bfloat16(), weight.bfloat16(), labels, train_weight=True)
    assert torch.equal(got[1], expected[1].float())
    with torch.autocast("cuda", torch.bfloat16):
        got = run(linear_cross_entropy, hidden, weight, labels, train_weight=True)
    assert torch.equal(got[2], expected[2].float())
