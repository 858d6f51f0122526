"""Decoder layers whose addition and norm are one kernel: found by comparing, checkpointed as before, and handing on FP8 rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rft.kernels import fp8
from rft.memory.recompute import apply_recompute
from rft.models.attention import install_attention, register
from rft.models.backbone import Backbone, decoder_layers
from rft.models.decoder_layer import DECODER_LAYER, count_handed_rows, readers_of_one_input
from rft.models.norm import rms_norm_matcher
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from rft.quant.fp8 import quantise_base
from support.close import assert_close
from support.families import build
from support.rows import packed_batch, random_documents


def run(model, batch):
    """Hidden states of a packed batch, and the gradient of each parameter."""
    state = install_attention(model, "sdpa")
    hidden, _ = Backbone(model, state)(batch)
    hidden.square().sum().backward()
    return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def with_layers(family: str, *, others: bool = False) -> tuple[nn.Module, Receipts]:
    register()
    model, receipts = build(family, attention="rft").train(), Receipts()
    matchers = None if others else [rms_norm_matcher(kernels=True), DECODER_LAYER]
    apply_swaps(model, receipts, kernels=True, matchers=matchers)
    return model, receipts


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_the_layer_is_still_one_of_its_class_and_is_checkpointed_bit_for_bit(family):
    model, receipts = with_layers(family)
    plain = build(family, attention="rft")
    for own, theirs in zip(decoder_layers(model), decoder_layers(plain), strict=True):
        assert isinstance(own, type(theirs))
        assert type(own).__name__ == type(theirs).__name__
    assert [a.count for a in receipts.applied if a.what == "add and norm"] == [2]
    batch = packed_batch(*random_documents(13, 5, 21), fill=2)
    hidden, gradients = run(model, batch)
    again = with_layers(family)[0]
    assert apply_recompute(list(decoder_layers(again)), "full") == 2
    runs = []
    for layer in decoder_layers(again):
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    hidden_again, gradients_again = run(again, batch)
    assert len(runs) == 4  # forward, and once more in the backward
    assert torch.equal(hidden_again, hidden)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name


class _Layer(nn.Module):
    """What a layer may do between its parts."""

    def __init__(self, original, residual=1.0, swallow=False):
        super().__init__()
        self.attention, self.feed_forward = original.self_attn, original.mlp
        # in the order in which they are not used
        self.second, self.first = original.post_attention_layernorm, original.input_layernorm
        self.residual, self.swallow = residual, swallow

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        more = {} if self.swallow else kwargs
        out, _ = self.attention(
            hidden_states=self.first(hidden_states), attention_mask=attention_mask, position_embeddings=position_embeddings, **more
        )  # fmt: skip
        hidden = hidden_states + self.residual * out
        return hidden + self.feed_forward(self.second(hidden))


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, None), ({"residual": 0.9}, "differs by"), ({"swallow": True}, "forward differs by inf")],
    ids=["norms in another order", "a factor on the residual", "arguments that attention does not get"],
)
def test_what_the_layer_does_is_found_by_comparing_and_not_by_names(options, why):
    register()
    model = build("llama", attention="rft").train()
    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        layers[index] = _Layer(layer, **options)
    original, receipts = copy.deepcopy(model), Receipts()
    apply_swaps(model, receipts, kernels=True, matchers=[rms_norm_matcher(kernels=True), DECODER_LAYER])
    if why:
        assert why in next(d.why for d in receipts.declined if d.what == "add and norm")
    else:
        (applied,) = (a for a in receipts.applied if a.what == "add and norm")
        assert applied.how == "addition and second in one pass"
    batch = packed_batch(*random_documents(13, 5))
    (truth, expected), (hidden, gradients) = run(original, batch), run(model, batch)
    assert_close(hidden, truth, 1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, 2e-5, name)


def test_norms_hand_on_fp8_rows_and_nothing_else_of_the_step_changes(monkeypatch):
    from peft import LoraConfig, get_peft_model

    passes = []
    plain = fp8.quantise_rows
    monkeypatch.setattr(fp8, "quantise_rows", lambda x: passes.append(x.shape[-1]) or plain(x))
    products = []
    plain_back = fp8.product_back
    monkeypatch.setattr(fp8, "product_back", lambda *given: products.append(given[2].shape[1]) or plain_back(*given))
    batch = packed_batch(*random_documents(13, 5))
    runs = []
    for matched in (False, True):
        register()
        torch.manual_seed(0)
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(build("llama", attention="rft"), LoraConfig(r=4, target_modules=names)).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        apply_swaps(model, Receipts(), kernels=True)
        layers = list(decoder_layers(model))
        quantise_base(layers, keep_ends=0, readers=readers_of_one_input)
        assert count_handed_rows(layers) == (4, 4)
        if not matched:  # a listener on the norm: it has to be called
            for layer in layers:
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.register_forward_hook(lambda *_: None)
            assert count_handed_rows(layers) == (0, 4)
        passes.clear()
        products.clear()
        runs.append((*run(model, batch), len(passes)))
    (hidden, gradients, own_passes), (hidden_again, gradients_again, left) = runs
    assert torch.equal(hidden_again, hidden)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name
    # of each layer the inputs of q, k, v and of gate, up; what is left: inputs and gradients of o and down; the gradients of q, k, v and those of
    # gate, up are quantised together
    assert own_passes - left == 4
    assert left == 2 * 4
    q, kv, inner, width = 64, 32, 96, 64
    assert sorted(products) == sorted(
        2 * [2 * inner, width, width] + [q + 2 * kv]
    )  # nothing asks for the first layer's input
