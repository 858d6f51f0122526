"""An MLP in pieces of the sequence: the same output and gradients, each parameter's gradient once, and never all of what is wide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft.adapters.lora import initialise, inject
from rft.config.adapter import LoraConfig
from rft.memory.recompute import apply_recompute
from rft.memory.tiled_mlp import apply_tiled_mlp, pieces_of
from rft.models.attention import install_attention, register
from rft.models.backbone import Backbone, decoder_layers
from rft.models.head import Head
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.close import assert_close_fp32
from support.families import build
from support.rows import packed_batch, random_documents

LENGTHS = (13, 40, 21)  # 74 tokens: pieces of 32, 32 and 10


def run(
    tiles: int, *, lora: bool = False, dropout: float = 0.0, kernels: bool = False, recompute="none", family="llama"
):
    """(loss, gradients, how often each parameter's gradient came)."""
    register()
    model = build(family, attention="rft").train()
    if lora:
        config = LoraConfig(r=4, alpha=8.0, dropout=dropout)
        model = inject(model, config, dtype=torch.float32, base_id="", new_token_ids=[], receipts=Receipts())
        initialise(model, config, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if kernels:
        apply_swaps(model, Receipts(), kernels=True)
    state = install_attention(model, "math" if family == "gemma2" else "sdpa")
    layers = list(decoder_layers(model))
    if tiles > 1:
        assert apply_tiled_mlp(layers, tiles) == (len(layers), {})
    apply_recompute(layers, recompute)
    arrived: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, n=name: arrived.update({n: arrived.get(n, 0) + 1}))
    torch.manual_seed(11)
    batch = packed_batch(*random_documents(*LENGTHS))
    hidden, _ = Backbone(model, state)(batch)
    loss = Head(model).loss_sums(hidden, batch.labels)["next_token"]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, arrived


def assert_same(got, plain) -> None:
    torch.testing.assert_close(got[0], plain[0], rtol=1e-6, atol=0)
    assert got[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        assert_close_fp32(got[1][name], gradient, what=name)
    assert set(got[2].values()) == {1}, "handed over once"


def test_pieces_are_nearly_equal_multiples_and_cover_the_sequence():
    assert pieces_of(74, 3) == [(0, 32), (32, 64), (64, 74)]
    assert pieces_of(64, 4) == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert pieces_of(10, 8) == [(0, 10)]
    assert pieces_of(100, 1) == [(0, 100)]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_pieces_give_what_the_whole_gives(lora, recompute):
    assert_same(run(3, lora=lora, recompute=recompute), run(1, lora=lora))


@pytest.mark.parametrize("family", ["phi3", "gemma2", "qwen3"])
def test_other_families(family):
    assert_same(run(3, family=family), run(1, family=family))


@pytest.mark.slow
def test_fused_lora_blocks_in_pieces():
    assert_same(run(3, lora=True, kernels=True), run(1, lora=True, kernels=True))


def test_a_mixture_of_experts_is_left_with_the_reason():
    layers = list(decoder_layers(build("mixtral", attention="rft")))
    count, left = apply_tiled_mlp(layers, 2)
    assert count == 0
    assert left == {"MixtralDecoderLayer has no gated MLP whose rows are independent": len(layers)}


class Wide(nn.Module):
    """A gated MLP that notes how many rows it saw and whether a graph was made."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 24, bias=False)
        self.down_proj = nn.Linear(24, 8, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.seen: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.shape[-2], torch.is_grad_enabled()))
        return self.dropout(self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def test_backward_draws_the_dropout_of_the_forward_and_leaves_the_generator_alone():
    torch.manual_seed(0)
    layer = nn.Module()
    layer.mlp = mlp = Wide()
    assert apply_tiled_mlp([layer], 4) == (1, {})
    x = torch.randn(1, 64, 8, requires_grad=True)
    out = mlp(x)
    assert mlp.seen == [(16, False)] * 4, "forward: pieces without a graph"
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert mlp.seen[4:] == [(16, True)] * 4
    # d sum / d bias of a dropped number is 0: the same numbers were dropped in both passes
    kept = (out != 0).float() * 2
    inner = nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    wanted = kept[0].T @ inner[0]
    torch.testing.assert_close(mlp.down_proj.weight.grad, wanted, rtol=1e-5, atol=1e-6)


def test_gradients_of_bf16_weights_are_added_up_in_fp32():
    torch.manual_seed(0)
    layer = nn.Module()
    layer.mlp = mlp = Wide().bfloat16()
    mlp.dropout.p = 0.0
    for parameter in mlp.parameters():
        parameter.grad_dtype = torch.float32
    x = torch.randn(1, 2048, 8).bfloat16()
    pieces = []
    for start in range(0, 2048, 16):
        g = torch.autograd.grad(mlp(x[:, start : start + 16]).float().sum(), list(mlp.parameters()))
        pieces.append([t.float() for t in g])
    wanted = [sum(p[i] for p in pieces) for i in range(3)]
    apply_tiled_mlp([layer], 128)
    mlp(x).float().sum().backward()
    for parameter, truth in zip(mlp.parameters(), wanted, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert_close_fp32(parameter.grad, truth)
