"""On a GPU: copies behind the computation change no bit, the host is not waited for, and nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rft.config.optim import AdamW8bitConfig, AdamWConfig
from rft.memory.disk import DiskFile
from rft.memory.host_pool import HostPool
from rft.memory.offload import Offloader
from rft.memory.recompute import apply_recompute
from rft.memory.tiled_mlp import apply_tiled_mlp
from rft.optim.build import build
from rft.optim.home import Home

pytestmark = pytest.mark.gpu
LAYERS, WIDTH, TOKENS = 6, 1024, 4096


class Layer(nn.Module):
    """A gated MLP with a residual, checkpointed as transformers' layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Dropout(0.1)
        self.gradient_checkpointing = False

    def _inside(self, x):
        return x + self.dropout(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))

    def forward(self, x):
        return self._gradient_checkpointing_func(self._inside, x) if self.gradient_checkpointing else self._inside(x)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS)).to("cuda", torch.bfloat16)


def step(layers: nn.ModuleList, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    for layer in layers:
        x = layer(x)
    loss = x.float().square().mean()
    loss.backward()
    return loss.detach()


def offloader(where: str, folder: Path, **options) -> Offloader:
    disk = DiskFile(folder) if where == "disk" else None
    limit = 3 * 2 * TOKENS * WIDTH if where == "disk" else 1 << 32
    return Offloader(where, torch.device("cuda"), HostPool(limit, pinned=True, disk=disk), LAYERS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("recompute", ["none", 2, "full"])
def test_offloaded_gradients_are_the_same_bits(recompute, where, tmp_path: Path):
    plain = model()
    losses = [step(plain, seed) for seed in range(4)]
    layers = model()
    own = offloader(where, tmp_path)
    apply_recompute(list(layers), recompute, own)
    assert [float(step(layers, seed)) for seed in range(4)] == [float(loss) for loss in losses]
    for (name, wanted), got in zip(plain.named_parameters(), layers.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad), name
    assert own.moved_bytes > 0
    assert own.fetched_late == 0
    if where == "disk":
        assert own.pool.disk.written_bytes > 0
    own.close()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_of_some_layers_alone_too_and_what_left_is_let_go_before_the_loss(recompute, tmp_path: Path):
    plain = model()
    loss = step(plain)
    layers = model()
    own = offloader("cpu", tmp_path, leaving=[0, 3])
    apply_recompute(list(layers), recompute, own, count=3)
    for _ in range(2):
        layers.zero_grad()
        assert float(step(layers)) == float(loss)
    for wanted, got in zip(plain.parameters(), layers.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)
    assert own.fetched_late == 0
    assert {item.group.index for item, _ in own._leaving} <= {3}


def test_the_device_keeps_less_and_neither_memory_grows(tmp_path: Path):
    layers, own = model(), offloader("cpu", tmp_path)
    apply_recompute(list(layers), "full")
    step(layers)
    torch.cuda.reset_peak_memory_stats()
    step(layers)
    plain = torch.cuda.max_memory_allocated()
    apply_recompute(list(layers), "full", own)
    step(layers)
    torch.cuda.reset_peak_memory_stats()
    step(layers)
    assert torch.cuda.max_memory_allocated() < plain
    held, allocated = own.pool.bytes, torch.cuda.memory_allocated()
    for seed in range(50):
        step(layers, seed)
    torch.cuda.synchronize()
    assert own.pool.bytes == held
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)


def test_the_host_does_not_wait_in_a_step_on_the_host(tmp_path: Path):
    layers, own = model(), offloader("cpu", tmp_path)
    apply_recompute(list(layers), "full", own)
    for _ in range(2):  # buffers are pinned in the first
        step(layers)
    for layer in layers:
        layer.dropout.p = 0.0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        x = torch.zeros(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        for layer in layers:
            x = layer(x)
        x.float().square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tiled_mlps_give_the_same_gradients():
    plain, layers = model(), model()
    for layer in (*plain, *layers):
        layer.dropout.p = 0.0
    own = [Gated(layer) for layer in layers]
    assert apply_tiled_mlp(own, 8)[0] == LAYERS
    for layer, gated in zip(layers, own, strict=True):
        layer._inside = lambda x, g=gated: x + g.mlp(x)
    loss, wanted = step(layers), step(plain)
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=0)
    for a, b in zip(layers.parameters(), plain.parameters(), strict=True):
        assert (a.grad.float() - b.grad.float()).norm() <= 1e-2 * b.grad.float().norm()


class Gated(nn.Module):
    """The linears of a layer as a gated MLP."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.mlp = Mlp(layer)


class Mlp(nn.Module):
    def __init__(self, layer: Layer):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = layer.gate, layer.up, layer.down

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_states_elsewhere_give_the_same_weights(where, in_backward, tmp_path: Path):
    ended = []
    for home in (None, Home(where, torch.device("cuda"), tmp_path)):
        torch.manual_seed(0)
        layers = nn.ModuleList(Layer() for _ in range(2)).cuda()
        config = AdamWConfig(lr=1e-3, in_backward=in_backward)
        optimizer = build(layers.named_parameters(), config, compute_dtype=torch.bfloat16, home=home)
        for seed in range(4):
            step(layers, seed)
            optimizer.step()
            optimizer.zero_grad()
        ended.append({n: m.cpu().clone() for n, m in optimizer.named_masters().items()})
    for name, wanted in ended[0].items():
        torch.testing.assert_close(ended[1][name], wanted, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("paged", [False, True])
def test_8_bit_moments_follow_the_fp32_ones(paged):
    pytest.importorskip("bitsandbytes")
    moved = []
    for config in (AdamWConfig(lr=1e-3), AdamW8bitConfig(lr=1e-3, paged=paged)):
        layers = model()
        start = [p.detach().float().clone() for p in layers.parameters()]
        optimizer = build(layers.named_parameters(), config)
        for seed in range(8):
            step(layers, seed)
            optimizer.step()
            optimizer.zero_grad()
        moved.append([p.detach().float() - s for p, s in zip(layers.parameters(), start, strict=True)])
    for got, wanted in zip(moved[1], moved[0], strict=True):
        assert float((got * wanted).sum() / wanted.square().sum()) == pytest.approx(1, abs=0.1)
