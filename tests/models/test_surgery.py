"""Swaps are made only where they equal the original, and the receipt says what was done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft.models.norm import RMSNorm, looks_like_rms_norm
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.close import assert_no_worse
from support.families import FAMILIES, build
from support.rows import random_documents

# family -> (norms, casting)
LLAMA, OLMO, GEMMA = "round_then_scale", "scale_then_round", "one_plus_weight"
SWAPPED = {
    "llama": (5, LLAMA), "mistral": (5, LLAMA), "qwen2": (5, LLAMA), "qwen3": (9, LLAMA), "phi3": (5, LLAMA), "smollm3": (5, LLAMA),
    "mixtral": (5, LLAMA), "qwen3_moe": (9, LLAMA), "granite": (5, LLAMA), "glm4": (9, LLAMA), "deepseek_v3": (9, LLAMA), "glm4_moe": (5, LLAMA),
    "olmo2": (9, OLMO), "olmo3": (9, OLMO), "gpt_oss": (5, OLMO), "gemma2": (9, GEMMA), "gemma3_text": (13, GEMMA), "qwen3_next": (7, GEMMA),
}  # fmt: skip


@pytest.mark.parametrize("family", SWAPPED)
def test_every_norm_of_the_family_is_swapped_with_equal_logits_and_gradients_and_a_receipt(family):
    count, casting = SWAPPED[family]
    ids = random_documents(12)[0][None]
    original, swapped = (build(family).bfloat16().float() for _ in range(2))  # weights that bf16 holds exactly
    names = list(swapped.state_dict())
    receipts = Receipts()
    apply_swaps(swapped, receipts)
    ours = [m for m in swapped.modules() if isinstance(m, RMSNorm)]
    assert {m.casting for m in ours} == {casting}
    (applied,) = receipts.applied
    assert (applied.what, applied.count) == ("rms_norm", count)
    assert len(ours) == count
    assert set(applied.checked) >= {"fp32 forward", "bf16 forward", "bf16 input gradient", "fp32 weight gradient"}
    assert list(swapped.state_dict()) == names
    truth: list = []
    for dtype in (torch.float32, torch.bfloat16):
        runs = []
        for model in (original.to(dtype), swapped.to(dtype)):
            model.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits
            logits.float().square().mean().backward()
            runs.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        (plain, gradients), (got, own) = runs
        truth = truth or runs  # fp32 comes first
        assert_no_worse(got, plain, truth[0][0], what=f"logits in {dtype}")
        for name, gradient in gradients.items():
            assert_no_worse(own[name], gradient, truth[0][1][name], what=name)


def test_swaps_are_verified_while_the_model_is_on_meta():
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES["qwen3"]())
    receipts = Receipts()
    apply_swaps(model, receipts)
    assert receipts.applied[0].count == 9
    assert all(p.is_meta for p in model.parameters())


def test_a_mean_subtracting_norm_is_declined_with_the_measured_error():
    receipts = Receipts()
    model = build("cohere2")
    apply_swaps(model, receipts)
    assert not receipts.applied
    (declined,) = receipts.declined
    assert declined.count == 3
    assert "Cohere2LayerNorm" in declined.why
    assert "differs by" in declined.why


@pytest.mark.parametrize("family", ["bamba", "falcon_h1"])
def test_gated_norms_do_not_match(family):
    gated = [m for m in build(family).modules() if "Gated" in type(m).__name__]
    if family == "bamba":
        assert gated
    assert not any(looks_like_rms_norm(m) for m in gated)


class _Norm(nn.Module):
    """A norm with a fault: what `fault` says."""

    def __init__(self, fault: str):
        super().__init__()
        self.weight, self.variance_epsilon, self.fault = nn.Parameter(torch.ones(16)), 1e-6, fault

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.fault == "detached gradient":
            y = y.detach() + 0 * x.float()
        if self.fault == "slightly larger":
            y = y * 1.001
        if self.fault == "wrong only in bf16" and x.dtype == torch.bfloat16:
            y = y.to(torch.float8_e4m3fn).float()
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("fault", ["detached gradient", "slightly larger", "wrong only in bf16"])
def test_a_norm_that_differs_in_any_check_is_left_alone(fault):
    model = nn.Sequential(_Norm(""), _Norm(fault))
    receipts = Receipts()
    apply_swaps(model, receipts)
    assert isinstance(model[0], RMSNorm)
    assert isinstance(model[1], _Norm)
    assert (receipts.applied[0].count, receipts.applied[0].of, receipts.declined[0].count) == (1, 2, 1)


def test_gemma_form_adds_one_in_fp32_and_llama_form_does_not():
    """BO-23."""
    x = torch.tensor([[3.0, 4.0]])
    zero = nn.Parameter(torch.zeros(2))
    assert torch.allclose(RMSNorm(zero, 0.0, GEMMA)(x), torch.tensor([[0.848528, 1.131371]]), atol=1e-6)
    assert not RMSNorm(zero, 0.0, LLAMA)(x).any()
    small = nn.Parameter(torch.full((2,), 0.00390625, dtype=torch.bfloat16))
    exact = x / x.square().mean().sqrt() * 1.00390625
    assert torch.allclose(RMSNorm(small, 0.0, GEMMA)(x), exact, rtol=1e-6)


def test_norms_that_peft_keeps_twice_are_declined():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["model.norm"]))
    receipts = Receipts()
    apply_swaps(model, receipts)
    assert receipts.applied[0].count == 4
    assert receipts.declined[0].count == 2
    assert "trained copy" in receipts.declined[0].why
