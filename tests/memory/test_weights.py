"""Weights that lie on the host and visit: the same bits as without, at most three layers here, and trained ones come home changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft.config.optim import AdamWConfig, LionConfig
from rft.errors import ConfigError
from rft.memory.recompute import apply_recompute
from rft.memory.weights import WeightStream
from rft.optim import BUILDERS, Home
from support.ranked import gathered, make_run, write_base
from support.ranked import steps as run_steps

LAYERS, WIDTH = 5, 64
CPU = torch.device("cpu")
CUDA = pytest.param(torch.device("cuda"), marks=pytest.mark.gpu, id="cuda")


class Layer(nn.Module):
    """A norm and a gated MLP with a residual, checkpointed as transformers' layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 96, bias=False), nn.Linear(WIDTH, 96, bias=False)
        self.down, self.dropout = nn.Linear(96, WIDTH, bias=False), nn.Dropout(0.1)
        self.gradient_checkpointing = False

    def _inside(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))

    def forward(self, x: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(self._inside, x) if self.gradient_checkpointing else self._inside(x)


class Model(nn.Module):
    def __init__(self, device: torch.device, dtype: torch.dtype, trained: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.to(dtype)
        self.requires_grad_(trained)
        self.stream: WeightStream | None = None
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def steps(
    device: torch.device, *, away: bool, optim=None, dtype=torch.float32, home: bool = False, recompute: str = "full", count: int = 3,
) -> tuple[list[float], dict[str, Tensor], Model]:  # fmt: skip
    """Losses of some steps over two micro-batches' worth of rows, and all trained tensors behind them."""
    model = Model(device, torch.float32, trained=True)
    model.stream = WeightStream(model.layers, device) if away else None
    apply_recompute(list(model.layers), recompute, weights=model.stream)
    named = list(model.named_parameters())
    optimizer = BUILDERS[type(optim)](
        named, optim, compute_dtype=dtype if dtype != torch.float32 else None, home=Home("cpu", device) if home else None, away=model.stream
    )  # fmt: skip
    losses = []
    for seed in range(count):
        torch.manual_seed(seed)
        x = torch.randn(32, WIDTH, device=device, dtype=dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.norm_in_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {n: t.clone() for n, t in optimizer.named_masters().items()}, model


@pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), CUDA])
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize(
    ("optim", "dtype", "home"),
    [
        (AdamWConfig(lr=1e-2, in_backward=True), torch.float32, False),
        (AdamWConfig(lr=1e-2, in_backward=True), torch.bfloat16, True),
        (LionConfig(lr=1e-2, in_backward=True), torch.float32, True),
    ],
    ids=["masters are the weights", "fp32 masters at home", "states at home"],
)
def test_trained_weights_are_the_same_bits_and_three_layers_are_here(device, recompute, optim, dtype, home):
    plain = steps(device, away=False, optim=optim, dtype=dtype, home=home, recompute=recompute)
    own = steps(device, away=True, optim=optim, dtype=dtype, home=home, recompute=recompute)
    assert own[0] == plain[0]
    assert own[0][0] != own[0][-1]
    for name, tensor in plain[1].items():
        assert torch.equal(own[1][name].cpu(), tensor.cpu()), name
    stream = own[2].stream
    assert stream is not None
    stream.settle()
    assert stream.most_layers_here <= 3
    matrices = [p for p in own[2].parameters() if p.dim() == 2]
    assert all(p.untyped_storage().nbytes() == 0 for p in matrices)


def test_frozen_weights_visit_for_adapters_over_several_micro_batches_and_evaluation():
    def run(away: bool) -> tuple[list[Tensor], Tensor]:
        model = Model(CPU, torch.float32, trained=False)
        scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(LAYERS))
        if away:
            model.stream = WeightStream(model.layers, CPU)
        apply_recompute(list(model.layers), "full", weights=model.stream)
        if model.stream is not None:
            assert model.stream.take_frozen() == 3 * LAYERS
            assert "host memory" in model.stream.describe()
        torch.manual_seed(1)
        for _ in range(2):
            x = torch.randn(16, WIDTH)
            for layer, scale in zip(model.layers, scales, strict=True):
                x = layer(x * scale)
            x.square().mean().backward()
        with torch.no_grad():
            seen = model.eval()(torch.ones(4, WIDTH))
        return [p.grad for p in scales], seen

    (plain, plain_seen), (own, own_seen) = run(False), run(True)
    assert torch.equal(plain_seen, own_seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, own, strict=True))


def test_loading_writes_what_lies_on_the_host():
    optim = AdamWConfig(lr=1e-2, in_backward=True)
    _, trained, _ = steps(CPU, away=False, optim=optim, dtype=torch.bfloat16, home=True)
    for dtype, home in ((torch.bfloat16, True), (torch.float32, False)):
        model = Model(CPU, torch.float32, trained=True)
        stream = WeightStream(model.layers, CPU)
        optimizer = BUILDERS[AdamWConfig](
            list(model.named_parameters()), optim, compute_dtype=dtype if dtype != torch.float32 else None,
            home=Home("cpu", CPU) if home else None, away=stream,
        )  # fmt: skip
        optimizer.load_masters(trained)
        for name, tensor in optimizer.named_masters().items():
            assert torch.equal(tensor, trained[name]), name
        x = torch.ones(2, WIDTH, dtype=dtype)
        plain = Model(CPU, torch.float32, trained=True)
        plain.load_state_dict(trained)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain.to(dtype).eval()(x))


# ---- a run


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("weights") / "base")


FULL = {"optim": {"name": "adamw", "lr": 1e-3, "in_backward": True}, "train": {"max_grad_norm": "none"}}


@pytest.mark.parametrize(
    ("lora", "tables", "memory"),
    [
        (True, {}, {"recompute": "selective", "offload": "cpu"}),
        (False, FULL, {"recompute": "full", "tiled_mlp": 2}),
        (False, {**FULL, "train": {**FULL["train"], "precision": "bf16"}}, {"offload_states": "cpu"}),
        (False, {"optim": {"name": "adamw_8bit", "lr": 1e-3, "in_backward": True},
                 "train": {**FULL["train"], "precision": "bf16", "master": "bfloat16"}}, {}),
    ],
    ids=["lora", "full", "full, fp32 masters at home", "full, 8-bit states of bf16 weights"],
)  # fmt: skip
def test_a_run_is_the_same_bit_for_bit(base, tmp_path: Path, lora, tables, memory):
    options = {"lora": lora, "packs_per_step": 1 if not lora else 2, **tables}
    plain = make_run(base, tmp_path / "plain", **options, memory={k: v for k, v in memory.items() if k == "tiled_mlp"})
    own = make_run(base, tmp_path / "own", **options, memory={**memory, "offload_weights": "cpu"})
    assert run_steps(own, 3) == run_steps(plain, 3)
    got, wanted = gathered(own), gathered(plain)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    assert own.trainee.weights.most_layers_here > 0
    told = {receipt.what for receipt in own.replanner.job.receipts.applied}
    assert "weights on cpu" in told


def test_what_would_not_leave_is_refused_by_name(base, tmp_path: Path):
    tables = {**FULL, "train": {**FULL["train"], "precision": "bf16"}}
    with pytest.raises(ConfigError, match=r"memory.offload_weights(.|\n)*fp32 masters would stay(.|\n)*offload_states"):
        make_run(base, tmp_path / "run", lora=False, **tables, memory={"offload_weights": "cpu"})
