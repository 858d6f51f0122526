"""Layers that are computed again give the same gradients and keep less."""

from __future__ import annotations

import pytest
import torch

from rft.errors import Refused
from rft.memory.recompute import apply_recompute, recomputed
from rft.models.attention import install_attention, register
from rft.models.backbone import Backbone, decoder_layers
from rft.models.head import Head
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.families import build
from support.rows import packed_batch, random_documents


def test_every_nth_layer_counted_from_the_first():
    assert recomputed("none", 5) == []
    assert recomputed("full", 3) == [0, 1, 2]
    assert recomputed(2, 5) == [0, 2, 4]
    assert recomputed(4, 3) == [0]


def step(recompute, *, kernels: bool, family: str = "llama"):
    """Gradients of a packed batch, bytes that autograd kept of the forward pass, and how often an MLP was run."""
    register()
    model = build(family, attention="rft").train()
    if kernels:
        apply_swaps(model, Receipts(), kernels=True)
    state = install_attention(model, "sdpa")
    apply_recompute(list(decoder_layers(model)), recompute)
    calls = []
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = packed_batch(*random_documents(13, 5, 21))
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden, _ = Backbone(model, state)(batch)
    total = Head(model).loss_sums(hidden, batch.labels)["next_token"]
    total.backward()
    return {n: p.grad for n, p in model.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "kernels"])
def test_gradients_are_those_without_it_bit_for_bit_and_less_is_kept(kernels):
    plain, all_bytes = step("none", kernels=kernels)
    half, half_bytes = step(2, kernels=kernels)
    full, full_bytes = step("full", kernels=kernels)
    for gradients in (half, full):
        for name, gradient in plain.items():
            assert torch.equal(gradients[name], gradient), name
    assert full_bytes < half_bytes < all_bytes


def test_a_model_without_checkpointing_layers_is_refused_with_its_name():
    with pytest.raises(Refused, match=r"Linear has no checkpointing.*\n.*none"):
        apply_recompute([torch.nn.Linear(2, 2)], "full")
    assert apply_recompute([torch.nn.Linear(2, 2)], "none") == 0
