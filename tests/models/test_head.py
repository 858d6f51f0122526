"""The loss head equals cross entropy over whole logits, and makes logits only where there is a label."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rft.models.head import Head, LogitTransform, labelled_rows
from rft.models.probe import probe_config
from support.close import assert_close


class _Model(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def get_output_embeddings(self):
        return self.head


def _case(tokens=40, hidden=16, vocabulary=50, labelled=0.6, seed=0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=g) * 3
    labels = torch.randint(0, vocabulary, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) > labelled] = -100
    weights = torch.rand(tokens, generator=g) + 0.5
    linear = nn.Linear(hidden, vocabulary, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(vocabulary, hidden, generator=g))
    return h, labels, weights, linear


@pytest.mark.parametrize(
    "transform",
    [LogitTransform(), LogitTransform(0.25), LogitTransform(1.0, 5.0), LogitTransform(3.0, 20.0)],
    ids=lambda t: t.describe(),
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, "auto"])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_equal_cross_entropy_over_all_logits(transform, weighted, chunk, bias):
    h, labels, weights, linear = _case()
    if bias:
        linear.bias = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(5)))
    runs = []
    for ours in (False, True):
        x = h.clone().requires_grad_(True)
        linear.zero_grad()
        w = weights if weighted else None
        if ours:
            total = Head(_Model(linear), transform, chunk_rows=chunk).loss_sums(
                x, labels[None], w, num_label_tokens=int((labels != -100).sum())
            )["next_token"]
        else:
            each = F.cross_entropy(transform(linear(x)), labels, reduction="none", ignore_index=-100)
            total = (each * (weights if weighted else 1)).sum()
        (total / 3).backward()
        runs.append((total.detach(), x.grad, *(p.grad.clone() for p in linear.parameters())))
    for truth, got in zip(*runs, strict=True):
        assert_close(got, truth, 1e-5)


def test_no_gradient_of_a_frozen_head_is_made_and_none_at_all_in_evaluation():
    h, labels, _, linear = _case()
    linear.requires_grad_(False)
    x = h.clone().requires_grad_(True)
    total = Head(_Model(linear)).loss_sums(x, labels)["next_token"]
    assert total.grad_fn.grads.weight is None
    assert total.grad_fn.grads.hidden is not None
    with torch.no_grad():
        again = Head(_Model(linear)).loss_sums(x, labels)["next_token"]
    assert again.grad_fn is None
    assert_close(again, total, 1e-6)


def test_a_batch_without_labels_gives_zero_and_zero_gradients():
    h, labels, _, linear = _case(labelled=0.0)
    for bias in (None, nn.Parameter(torch.zeros(50))):
        linear.zero_grad()
        linear.bias = bias
        x = h.clone().requires_grad_(True)
        total = Head(_Model(linear)).loss_sums(x, labels, num_label_tokens=0)["next_token"]
        total.backward()
        assert float(total) == 0.0
        assert not x.grad.any()
        assert linear.weight.grad is not None
        assert not linear.weight.grad.any()


def test_logits_exist_only_for_a_chunk_of_labelled_rows(monkeypatch):
    h, labels, _, linear = _case(tokens=200, labelled=0.3)
    rows = []
    real = torch.logsumexp
    monkeypatch.setattr(torch, "logsumexp", lambda z, **k: (rows.append(z.shape[0]), real(z, **k))[1])
    Head(_Model(linear), chunk_rows=16).loss_sums(h.requires_grad_(True), labels)["next_token"].backward()
    assert max(rows) <= 16
    assert sum(rows) == int((labels != -100).sum())


def test_labelled_rows_with_and_without_a_known_count_agree():
    labels = torch.tensor([-100, 5, -100, -100, 7, 8])
    assert labelled_rows(labels, 3).tolist() == labelled_rows(labels, None).tolist() == [1, 4, 5]


def test_bf16_loss_is_as_close_to_the_truth_as_plain_torch_in_bf16():
    from support.close import assert_no_worse

    h, labels, _, linear = _case(tokens=300, hidden=64, vocabulary=500)
    kept = labels != -100
    truth_x = h.clone().requires_grad_(True)
    F.cross_entropy(linear(truth_x), labels, reduction="sum").backward()
    half = linear.to(torch.bfloat16)
    plain_x, own_x = (h.bfloat16().requires_grad_(True) for _ in range(2))
    F.cross_entropy(half(plain_x).float(), labels, reduction="sum").backward()
    Head(_Model(half), chunk_rows=50).loss_sums(own_x, labels)["next_token"].backward()
    assert_no_worse(own_x.grad[kept], plain_x.grad[kept], truth_x.grad[kept])


def test_under_autocast_fp32_weights_are_multiplied_in_bf16():
    h, labels, _, linear = _case()
    x = h.clone().requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        total = Head(_Model(linear)).loss_sums(x, labels)["next_token"]
    total.backward()
    truth = F.cross_entropy((h.bfloat16() @ linear.weight.detach().bfloat16().T).float(), labels, reduction="sum")
    assert_close(total, truth, 1e-5)
    assert x.grad.dtype == linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", LogitTransform()), ("gemma2", LogitTransform(1.0, 30.0)), ("granite", LogitTransform(1 / 5.0)),
        ("cohere2", LogitTransform(0.25)), ("falcon_h1", LogitTransform(0.5)),
    ],
)  # fmt: skip
def test_the_probe_finds_what_the_model_does_to_its_logits(family, expected):
    from support.families import FAMILIES

    assert probe_config(FAMILIES[family]()).transform == expected


def test_a_soft_cap_beside_a_scale_is_found_and_anything_else_refused():
    import transformers

    from rft.errors import Refused
    from rft.models.probe import find_transform
    from support.families import FAMILIES

    config = FAMILIES["gemma3_text"]()
    config.final_logit_softcapping = 12.0
    assert probe_config(config).transform == LogitTransform(1.0, 12.0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]()).eval()
    original = model.forward
    model.forward = lambda **kw: (out := original(**kw), setattr(out, "logits", out.logits.square()))[0]
    with torch.no_grad(), pytest.raises(Refused, match="nor a scale or soft-cap"):
        find_transform(model)
