"""The router's auxiliary loss counts real tokens only, per pack, whatever the accumulation."""

from __future__ import annotations

import pytest
import torch

from rft.errors import Refused
from rft.models.attention import install_attention, register
from rft.models.aux_loss import RouterLoss, balance_losses
from rft.models.backbone import Backbone
from rft.models.probe import probe_config
from support.close import assert_close
from support.families import FAMILIES, build
from support.rows import packed_batch, random_documents


def test_padding_is_no_token_of_the_balance_loss():
    """BO-36: 1.0, where counting the two padding tokens would give 1.2."""
    p = torch.tensor([[0.8, 0.2], [0.2, 0.8], [0.9, 0.1], [0.9, 0.1]])
    logits = p.log()[None]
    assert_close(balance_losses(logits, 1, (2,)), torch.tensor([1.0]), 1e-6)
    assert_close(balance_losses(logits, 1, (4,)), torch.tensor([1.2]), 1e-6)


def test_filler_packs_add_nothing_and_packs_do_not_mix():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 12, 4, generator=g)
    together = balance_losses(logits, 2, (5, 0, 6)[:3])
    alone = [balance_losses(logits[:, 4 * i : 4 * i + 4], 2, (n,)) for i, n in enumerate((4, 0, 3))]
    assert_close(balance_losses(logits, 2, (4, 0, 3)), torch.cat(alone))
    assert float(together[1]) == 0.0


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_full_pack_gives_the_auxiliary_loss_and_router_gradients_of_transformers(family):
    (document,) = random_documents(24)
    stock = build(family)
    stock.config.output_router_logits = True
    out = stock(input_ids=document[None], labels=document[None], output_router_logits=True, use_cache=False)
    config = FAMILIES[family]()
    loss = RouterLoss.of(config, probe_config(config))
    assert loss.coefficient == stock.config.router_aux_loss_coef
    (loss.coefficient * out.aux_loss).backward()
    register()
    model = build(family, attention="rft")
    batch = packed_batch(document)
    _, router = Backbone(model, install_attention(model, "math"), router_logits=True)(batch)
    total = loss.loss_sums(router, batch)["router_aux"]
    assert loss.count_terms(batch) == {"router_aux": 1}
    total.backward()
    assert_close(total, loss.coefficient * out.aux_loss, 1e-5)
    for (name, own), (_, truth) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        if truth.grad is not None and truth.grad.any():
            assert_close(own.grad, truth.grad, 1e-4, name)


def test_fill_up_does_not_change_the_auxiliary_loss():
    config = FAMILIES["mixtral"]()
    loss = RouterLoss.of(config, probe_config(config))
    register()
    model = build("mixtral", attention="rft")
    backbone = Backbone(model, install_attention(model, "math"), router_logits=True)
    documents = random_documents(9, 6)
    values = [
        loss.loss_sums(backbone(b)[1], b)["router_aux"]
        for b in (packed_batch(*documents), packed_batch(*documents, fill=30))
    ]
    assert_close(values[1], values[0], 1e-5)


def test_full_training_is_refused_where_the_balance_is_not_a_loss_or_router_logits_are_missing():
    from dataclasses import replace

    config = FAMILIES["deepseek_v3"]()
    probed = probe_config(config)
    with pytest.raises(Refused, match=r"(?s)deepseek_v3.*adapter.name = \"lora\""):
        RouterLoss.of(config, probed)
    mixtral = FAMILIES["mixtral"]()
    with pytest.raises(Refused, match="no router logits"):
        RouterLoss.of(mixtral, replace(probe_config(mixtral), router_logits=False))
