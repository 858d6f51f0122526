"""AdamW with masters: equals torch's, decays matrices only, loses nothing to bf16, saves and loads by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rft.config.optim import AdamWConfig, GroupConfig
from rft.errors import ConfigError
from rft.optim.build import build as build_optimizer
from rft.optim.groups import parameter_groups


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4, dtype=dtype)
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.norm = nn.LayerNorm(4, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.embed(ids)))


IDS = torch.tensor([0, 1, 2, 3, 4, 2])
EMBEDDINGS = frozenset({"embed.weight"})


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(IDS).float() - torch.arange(24.0).view(6, 4) / 24).pow(2).sum()


def build(model: nn.Module, *, compute_dtype: torch.dtype | None = None, **config):
    config = AdamWConfig(**{"lr": 1e-2, "weight_decay": 0.1, **config})
    return build_optimizer(model.named_parameters(), config, compute_dtype=compute_dtype, embeddings=EMBEDDINGS)


def train(model: nn.Module, optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_weight_decay_falls_on_matrices_and_not_on_norms_biases_and_embeddings():
    groups = parameter_groups(Small().named_parameters(), AdamWConfig(weight_decay=0.1), 1e-2, EMBEDDINGS)
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decays == {
        "embed.weight": 0.0, "linear.weight": 0.1, "linear.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0,
    }  # fmt: skip


def test_fp32_equals_torch_adamw_with_the_same_groups():
    ours, theirs = Small(), Small()
    plain = [p for n, p in theirs.named_parameters() if n != "linear.weight"]
    reference = torch.optim.AdamW(
        [{"params": [theirs.linear.weight], "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    train(ours, build(ours), 5)
    train(theirs, reference, 5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_bf16_weights_with_fp32_masters_follow_the_fp32_run_where_bf16_masters_stand_still():
    """At a rate of 1e-5 a bf16 weight is too coarse to move: the reason for masters."""
    exact, mastered, coarse = Small(), Small(), Small(torch.bfloat16)
    coarse.load_state_dict(exact.state_dict())
    start = exact.linear.weight.detach().clone()
    masters = build(mastered, compute_dtype=torch.bfloat16, lr=1e-5, weight_decay=0.0)
    train(exact, build(exact, lr=1e-5, weight_decay=0.0), 20)
    train(mastered, masters, 20)
    train(coarse, build(coarse, lr=1e-5, weight_decay=0.0), 20)
    moved = (exact.linear.weight - start).abs()
    master = masters.named_masters()["linear.weight"]
    assert master.dtype == torch.float32
    # the median: Adam makes a full step of a gradient that is nothing but rounding, so single weights may differ
    assert (master - exact.linear.weight).abs().median() < 0.05 * moved.median()
    assert torch.equal(mastered.linear.weight, master.bfloat16()), "the module computes with the rounded master"
    assert (coarse.linear.weight - start.bfloat16()).abs().median() == 0


def test_gradients_of_bf16_weights_add_up_in_fp32():
    model = Small()
    build(model, compute_dtype=torch.bfloat16)
    assert model.linear.weight.dtype == torch.bfloat16
    for _ in range(64):
        (model.linear.weight * 0.0078125).sum().backward()  # 2^-7: in bf16 the sum of 64 would stop growing exactly
    (model.linear.weight * 1e-4).sum().backward()
    gradient = model.linear.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert gradient[0, 0].item() == pytest.approx(0.5 + 1e-4, abs=1e-6)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
def test_saved_and_loaded_optimizer_goes_on_bit_for_bit(compute_dtype):
    straight = Small()
    train(straight, build(straight, compute_dtype=compute_dtype), 6)

    first = Small()
    optimizer = build(first, compute_dtype=compute_dtype)
    train(first, optimizer, 3)
    masters = {k: v.clone() for k, v in optimizer.named_masters().items()}
    state = {k: v.clone() for k, v in optimizer.named_state().items()}
    second = Small()
    nn.init.zeros_(second.linear.weight)
    resumed = build(second, compute_dtype=compute_dtype)
    resumed.load_masters(masters)
    resumed.load_named_state(state)
    train(second, resumed, 3)
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_that_is_kept_wide_stays_the_master_itself():
    model = Small()
    optimizer = build_optimizer(
        model.named_parameters(), AdamWConfig(lr=1e-2), compute_dtype=torch.bfloat16, keep=frozenset({"norm.weight"})
    )
    assert model.norm.weight.dtype == torch.float32
    assert optimizer.named_masters()["norm.weight"].data_ptr() == model.norm.weight.data_ptr()
    assert model.norm.bias.dtype == torch.bfloat16


def test_a_group_by_name_has_its_own_rate_and_decay_and_the_first_match_counts():
    config = AdamWConfig(
        weight_decay=0.1,
        groups=[GroupConfig(match=r"^linear\.", lr=1e-3), GroupConfig(match="linear|norm", weight_decay=0.5)],
    )
    groups = parameter_groups(Small().named_parameters(), config, 1e-2, EMBEDDINGS)
    found = {name: (group["lr"], group["weight_decay"]) for group in groups for name in group["names"]}
    assert found == {
        "embed.weight": (1e-2, 0.0),
        "linear.weight": (1e-3, 0.1),
        "linear.bias": (1e-3, 0.0),
        "norm.weight": (1e-2, 0.5),
        "norm.bias": (1e-2, 0.5),
    }


def test_a_group_that_matches_nothing_is_refused():
    config = AdamWConfig(groups=[GroupConfig(match="lora_C", lr=1.0)])
    with pytest.raises(ConfigError, match="matches no trained parameter"):
        parameter_groups(Small().named_parameters(), config, 1e-2)
