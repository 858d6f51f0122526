"""Every kind of adapter that `[adapter]` offers, through the setup of a real run: trained, saved, and the same in stock PEFT."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers

from support.ranked import final, make_run, steps, write_base

KINDS = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "pissa": {"init": "pissa"},
    "olora": {"init": "olora"},
    "gaussian": {"init": "gaussian"},
    "bias": {"bias": "lora_only"},
    "whole module": {"modules_to_save": ["lm_head"]},
    "dropout": {"dropout": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_each_kind_of_adapter_trains_and_stock_peft_loads_what_it_saves(kind, tmp_path):
    base = write_base(tmp_path / "base")
    run = make_run(base, tmp_path / "run", adapter={"r": 4, **KINDS[kind]})
    losses = [step["loss"] for step in steps(run, 3)]
    assert all(loss == loss and loss > 0 for loss in losses)
    ids = torch.randint(5, 400, (1, 20), generator=torch.Generator().manual_seed(0))
    run.model.eval()
    folder = final(run)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, str(folder)).eval()
    positions = torch.arange(20)[None]
    with torch.no_grad():
        expected = loaded(input_ids=ids, position_ids=positions).logits
        got = run.trainee.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        untouched = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(input_ids=ids).logits
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert (expected - untouched).norm() > 1e-4 * expected.norm(), "nothing was trained"
