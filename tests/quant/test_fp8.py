"""A frozen base in FP8: what is quantised, what it costs, what is refused. On a CPU the FP8 numbers are multiplied in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft.errors import Refused
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from rft.quant.fp8 import Fp8Linear, quantise_base, refuse_without_fp8
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs
from support.rows import random_documents
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, layers=3, tied=True)
    return write_tiny_tokenizer(folder)


@pytest.mark.slow
def test_linears_between_the_first_and_last_layer_are_quantised_with_a_receipt_and_training_follows_bf16(
    model_dir, tmp_path
):
    packs = random_packs(4, seq_len=24)
    runs = {}
    for held in ("bf16", "fp8"):
        run = model_run(
            model_dir, tmp_path / held, packs, packs_per_step=2, kernels=held == "fp8", model={"base_weights": held}, optim={"lr": 2e-3},
            adapter={"name": "lora", "r": 4, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"]},
        )  # fmt: skip
        losses = [float(train_step(run, packs[i : i + 2]).terms["next_token"]) for i in (0, 2)]
        runs[held] = (run, losses)
    run, losses = runs["fp8"]
    assert losses == pytest.approx(runs["bf16"][1], rel=2e-2)
    assert losses != runs["bf16"][1]
    quantised = [n for n, m in run.model.named_modules() if isinstance(m, Fp8Linear)]
    assert len(quantised) == 7
    assert all(".layers.1." in n for n in quantised)
    (applied,) = [a for a in run.receipts["applied"] if a["what"] == "fp8 base"]
    assert (applied["count"], applied["of"]) == (7, 21)
    assert 0.01 < applied["checked"]["largest relative error of a weight"] < 0.05
    (declined,) = [d for d in run.receipts["declined"] if d["what"] == "fp8 base"]
    assert (declined["count"], declined["why"]) == (14, "in the first or last layer")
    masters = run.optimizer.named_masters()
    assert all(float(t.abs().max()) > 0 for n, t in masters.items() if ".layers.1." in n and "lora_B" in n)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_the_whole_model_in_fp8_stays_near_its_logits_and_saves_the_same_names():
    from peft import LoraConfig, get_peft_model

    from rft.models.attention import register
    from support.families import build

    register()
    model = get_peft_model(build("llama", attention="rft"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    ids = random_documents(30)[0][None]
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        saved = {n for n in model.state_dict() if "lora" in n}
        apply_swaps(model, Receipts(), kernels=True)
        done = quantise_base(list(model.base_model.model.model.layers), keep_ends=0)
        assert (done.count, done.of) == (14, 14)
        after = model(input_ids=ids, use_cache=False).logits
        assert (
            1e-3 < distance(after, before) < 0.15
        )  # two layers, four roundings of e4m3 (half a step is 3 %) one behind the other
        with model.disable_adapter():
            assert distance(model(input_ids=ids, use_cache=False).logits, before) < 0.15
    assert {n for n in model.state_dict() if "lora" in n} == saved


def test_fp8_without_a_gpu_that_has_it_is_refused_with_the_reason(model_dir, tmp_path, monkeypatch):
    with pytest.raises(Refused, match=r"8\.9.*this is a cpu"):
        model_run(model_dir, tmp_path, random_packs(1), model={"base_weights": "fp8"})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Refused, match=r"this GPU has 8\.0"):
        refuse_without_fp8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refuse_without_fp8(torch.device("cuda"))
