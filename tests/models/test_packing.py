"""Packed documents give the losses and gradients that they give alone, in stock transformers with eager attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

from rft.errors import Refused
from rft.models.attention import Needs, install_attention, register
from rft.models.backbone import Backbone
from rft.models.head import Head
from rft.models.probe import find_transform, probe_config, require_packing
from support.close import assert_close
from support.families import FAMILIES, build
from support.rows import packed_batch, random_documents
from support.tiny import randomise

RECURRENT = ["qwen3_next", "qwen3_5", "falcon_h1", "bamba", "granitemoehybrid", "lfm2"]
PACKED = [f for f in FAMILIES if f not in RECURRENT]
PLAIN_MATHS_ONLY = {"gemma2", "gpt_oss"}  # soft-cap, sinks
CASES = [(f, b) for f in PACKED for b in ("sdpa", "math") if b == "math" or f not in PLAIN_MATHS_ONLY]


def _stock_losses_and_gradients(family: str, documents: list[torch.Tensor]):
    model = build(family, attention="eager")
    losses = []
    for document in documents:
        logits = model(input_ids=document[None], use_cache=False).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, document[1:], reduction="sum"))
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_packed_losses_and_gradients_equal_those_of_separate_stock_documents(family, backend):
    documents = random_documents(13, 5, 21)  # shorter and longer than windows and chunks of 8
    truth, gradients = _stock_losses_and_gradients(family, documents)
    register()
    model = build(family, attention="rft")
    transform = find_transform_of(family)
    state = install_attention(model, backend)
    batch = packed_batch(*documents, fill=3)
    hidden, _ = Backbone(model, state)(batch)
    head = Head(model, transform, chunk_rows=7)
    total = head.loss_sums(hidden, batch.labels, num_label_tokens=batch.num_label_tokens)["next_token"]
    total.backward()
    assert state.calls > 0
    assert_close(total, truth.sum(), 1e-5, "loss")
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            error = float((parameter.grad - gradients[name]).abs().max())
            assert error <= 2e-5 * largest, f"{name}: {error:.2e} of {largest:.2e}"
    each = [
        head.loss_sums(h, y)["next_token"]
        for h, y in zip(hidden.split(batch.lengths), batch.labels[0].split(batch.lengths), strict=True)
    ]
    assert_close(torch.stack(each[:-1]), truth, 1e-5, "loss of each document")


def find_transform_of(family: str):
    with torch.no_grad():
        return find_transform(build(family))


@pytest.mark.parametrize("family", PACKED)
def test_the_probe_lets_families_that_keep_documents_apart_be_packed(family):
    probed = probe_config(FAMILIES[family]())
    assert probed.isolates, probed.reason
    assert probed.error <= 1e-5 < 1e-2 < probed.control
    require_packing(probed, packing="stream", micro_batch=4)


@pytest.mark.parametrize("family", RECURRENT)
def test_the_probe_refuses_to_pack_recurrent_layers_on_a_cpu_and_names_the_measured_error(family):
    probed = probe_config(FAMILIES[family]())
    assert not probed.isolates
    assert probed.error > 1e-2
    with pytest.raises(Refused, match=r"(?s)differ by [0-9.]+.*data.packing = \"none\""):
        require_packing(probed, packing="stream", micro_batch=1)
    with pytest.raises(Refused):
        require_packing(probed, packing="none", micro_batch=2)
    require_packing(probed, packing="none", micro_batch=1)


@pytest.mark.parametrize("family", ["falcon_h1", "lfm2"])
def test_a_recurrent_model_trains_on_one_document_a_row_with_fill_up_behind_it(family):
    (document,) = random_documents(17)
    truth, _ = _stock_losses_and_gradients(family, [document])
    register()
    model = build(family, attention="rft")
    state = install_attention(model, "sdpa")
    batch = packed_batch(document, fill=15)
    hidden, _ = Backbone(model, state, isolate=False)(batch)
    total = Head(model, find_transform_of(family)).loss_sums(hidden, batch.labels)["next_token"]
    assert_close(total, truth.sum(), 1e-5)


NO_REGISTRY = {
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=128, hidden_size=64, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=128,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256,
    ),
}


@pytest.mark.parametrize("family", NO_REGISTRY)
def test_a_model_outside_the_attention_registry_is_refused_for_packing_and_trains_on_one_document_a_row(family):
    config = NO_REGISTRY[family]()
    probed = probe_config(config)
    assert (probed.isolates, probed.attention) == (False, "eager")
    with pytest.raises(Refused, match="attention"):
        require_packing(probed, packing="stream", micro_batch=1)
    torch.manual_seed(0)
    model = randomise(
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=probed.attention)
    ).eval()
    (document,) = random_documents(17)
    truth = F.cross_entropy(
        model(input_ids=document[None], use_cache=False).logits[0, :-1], document[1:], reduction="sum"
    )
    batch = packed_batch(document, fill=15)
    hidden, _ = Backbone(model, install_attention(model, "math"), isolate=False)(batch)
    total = Head(model, probed.transform).loss_sums(hidden, batch.labels)["next_token"]
    assert_close(total, truth, 1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "math"])
def test_editing_one_document_leaves_the_others_untouched_on_every_backend(backend):
    """BO-01: A = 11..15, B = 21..23; A's 14 becomes 99."""
    register()
    model = build("llama", attention="rft")
    state = install_attention(model, backend)
    a, b = torch.tensor([11, 12, 13, 14, 15]), torch.tensor([21, 22, 23])
    edited = torch.where(a == 14, 99, a)
    with torch.no_grad():
        before, after = (Backbone(model, state)(packed_batch(x, b))[0] for x in (a, edited))
    assert (before[5:] - after[5:]).abs().max() <= 1e-6
    assert (before[3:5] - after[3:5]).abs().max() > 1e-2


def test_recomputation_in_the_backward_sees_its_own_batch_after_another_forward():
    """StableLM's layers swallow keyword arguments; two forwards run before either backward."""
    register()
    gradients = []
    for recompute in (False, True):
        model = build("stablelm", attention="rft").train()
        state = install_attention(model, "sdpa")
        if recompute:
            for layer in model.model.layers:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = _checkpoint
        batches = [packed_batch(*random_documents(9, 4, seed=1)), packed_batch(*random_documents(3, 10, seed=2))]
        backbone, head = Backbone(model, state), Head(model)
        sums = [head.loss_sums(backbone(b)[0], b.labels)["next_token"] for b in batches]
        for total in sums:
            total.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def _checkpoint(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def test_choose_backend_refuses_a_named_backend_that_cannot_serve_the_model():
    from rft.models.attention import choose_backend

    cpu, cuda, bf16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    capped = Needs(softcap=True, head_size=128, value_size=128)
    plain = Needs(head_size=128, value_size=128)
    assert choose_backend("auto", cpu, bf16, plain)[0] == "sdpa"
    assert choose_backend("auto", cuda, bf16, plain)[0] == "varlen"
    assert choose_backend("auto", cuda, torch.float32, plain)[0] == "sdpa"
    assert choose_backend("auto", cuda, bf16, capped)[0] == "math"
    assert choose_backend("auto", cuda, bf16, Needs(dropout=0.1, head_size=64, value_size=64))[0] == "sdpa"
    with pytest.raises(Refused, match="soft-cap"):
        choose_backend("sdpa", cpu, bf16, capped)
    with pytest.raises(Refused, match="needs CUDA"):
        choose_backend("varlen", cpu, bf16, plain)


def test_an_attention_argument_that_rft_does_not_know_is_refused():
    from rft.models.attention import attention

    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(Refused, match="position_bias"):
        attention(torch.nn.Identity(), q, q, q, None, position_bias=torch.zeros(1))


def test_a_layer_that_no_mask_reaches_is_recomputed_over_the_documents_of_its_forward():
    """The backward runs outside the bound forward, where only the module's state still knows the documents."""
    from rft.models.attention import Documents, attention

    module = torch.nn.Identity()
    state = install_attention(module, "math")
    q, k, v = (torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    gradients = []
    for run in (lambda f, x: f(x), _checkpoint):
        x = q.clone().requires_grad_(True)
        with state.bound(Documents.from_lengths((4, 5))):
            out = run(lambda x: attention(module, x, k, v, None)[0].tanh(), x)
        out.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
