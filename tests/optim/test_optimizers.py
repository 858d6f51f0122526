"""Every optimizer: against its formula in fp64, saved and resumed bit for bit, updated in backward, with its states elsewhere."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rft.config.optim import AdafactorConfig, AdamW8bitConfig, AdamWConfig, GroupConfig, LionConfig, MuonConfig
from rft.errors import ConfigError, Refused
from rft.optim.build import build
from rft.optim.groups import parameter_groups
from rft.optim.home import Home
from rft.optim.muon import orthogonalised

LR = 1e-2
COMMON = {"lr": LR, "weight_decay": 0.1}
CONFIGS = {
    "adamw": AdamWConfig(**COMMON),
    "adamw, bf16 states": AdamWConfig(**COMMON, states="bfloat16"),
    "adamw_8bit": AdamW8bitConfig(**COMMON),
    "adamw_8bit, torchao": AdamW8bitConfig(**COMMON, library="torchao"),
    "adafactor": AdafactorConfig(**COMMON),
    "lion": LionConfig(**COMMON),
    "lion, bf16 states": LionConfig(**COMMON, states="bfloat16"),
    "muon": MuonConfig(**COMMON),
}


@pytest.fixture(params=CONFIGS, ids=str)
def config(request):
    if "torchao" in request.param:
        pytest.importorskip("torchao", reason="torchao is an extra and not installed")
    return CONFIGS[request.param]


class Net(nn.Module):
    """Large enough for 8-bit codes: 5,120 numbers in a matrix, and some of every other kind."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 64, dtype=dtype)
        self.up = nn.Linear(64, 80, dtype=dtype)
        self.down = nn.Linear(80, 64, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(2, 8, 64, dtype=dtype) / 8)
        self.head = nn.Linear(64, 11, bias=False, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + (torch.einsum("td,ekd->tek", x, self.experts).tanh().mean(1) @ self.experts.mean(0))
        return nn.functional.cross_entropy(self.head(self.norm(x)).float(), (ids + 3) % 11, reduction="sum")


OUTER = {"embeddings": frozenset({"embed.weight"}), "head": frozenset({"head.weight"})}
BATCHES = [torch.randint(0, 11, (9,), generator=torch.Generator().manual_seed(i)) for i in range(12)]


def make(config, *, dtype: torch.dtype = torch.float32, **more):
    net = Net(dtype)
    return net, build(net.named_parameters(), config, **OUTER, **more)


def train(net: Net, optimizer, batches=BATCHES) -> None:
    for batch in batches:
        net(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


# ---- the formulas, in fp64


def adamw(w, g, s, t, decay, beta1=0.9, beta2=0.999, eps=1e-8):
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g * g
    return w * (1 - LR * decay) - LR * (s["m"] / (1 - beta1**t)) / ((s["v"] / (1 - beta2**t)).sqrt() + eps)


def lion(w, g, s, t, decay, beta1=0.9, beta2=0.99):
    m = s.get("m", torch.zeros_like(g))
    s["m"] = beta2 * m + (1 - beta2) * g
    return w * (1 - LR * decay) - LR * torch.sign(beta1 * m + (1 - beta1) * g)


def adafactor(w, g, s, t, decay):
    beta = 1 - t**-0.8
    square = g * g + 1e-30
    if g.ndim < 2:
        s["v"] = beta * s.get("v", 0) + (1 - beta) * square
        second = s["v"]
    else:
        s["r"] = beta * s.get("r", 0) + (1 - beta) * square.mean(-1)
        s["c"] = beta * s.get("c", 0) + (1 - beta) * square.mean(-2)
        second = s["r"][..., None] * s["c"][..., None, :] / s["r"].mean(-1)[..., None, None]
    update = g / second.sqrt()
    update = update / max(1.0, float(update.pow(2).mean().sqrt()))
    return w * (1 - LR * decay) - LR * update


def muon(w, g, s, t, decay, momentum=0.95):
    s["m"] = momentum * s.get("m", 0) + (1 - momentum) * g
    x = momentum * s["m"] + (1 - momentum) * g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.flatten(-2).norm(dim=-1)[..., None, None]
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.mT if tall else x
    return w * (1 - LR * decay) - LR * 0.2 * max(w.shape[-2:]) ** 0.5 * x


FORMULAS = {"adamw": adamw, "adamw_8bit": adamw, "lion": lion, "adafactor": adafactor, "muon": muon}


def formula_of(config, name: str, parameter: Tensor):
    if config.name == "muon" and (parameter.ndim < 2 or name in ("embed.weight", "head.weight")):
        return adamw
    return FORMULAS[config.name]


def reference(config, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    weights = {n: p.detach().double() for n, p in Net().named_parameters()}
    states: dict[str, dict] = {n: {} for n in weights}
    for t, step in enumerate(gradients, start=1):
        for name, w in weights.items():
            decay = 0.1 if w.ndim >= 2 and name != "embed.weight" else 0.0
            weights[name] = formula_of(config, name, w)(w, step[name].double(), states[name], t, decay)
    return weights


def random_gradients(steps: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = {n: p.shape for n, p in Net().named_parameters()}
    return [{n: torch.randn(s, generator=generator) * 0.1 for n, s in shapes.items()} for _ in range(steps)]


def apply(net: nn.Module, optimizer, gradients: list[dict[str, Tensor]]) -> None:
    for step in gradients:
        for name, parameter in net.named_parameters():
            parameter.grad = step[name].to(parameter.dtype, copy=True)
        optimizer.step()
        optimizer.zero_grad()


ALLOWED = {"adamw": 1e-5, "lion": 1e-5, "adafactor": 1e-5, "muon": 1e-4}
"""Difference of the whole movement from that of the formula in fp64. Muon's iteration multiplies rounding."""
COARSE = {"adamw, bf16 states": 2e-2, "adamw_8bit": 6e-2, "adamw_8bit, torchao": 6e-2}


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "lion, bf16 states"])
def test_weights_move_as_the_formula_says(name):
    if "torchao" in name:
        pytest.importorskip("torchao", reason="torchao is an extra and not installed")
    net, optimizer = make(CONFIGS[name])
    start, gradients = values(net), random_gradients()
    apply(net, optimizer, gradients)
    wanted = reference(CONFIGS[name], gradients)
    for key, got in values(net).items():
        moved = wanted[key] - start[key].double()
        error = float((got.double() - wanted[key]).norm() / moved.norm())
        small = got.numel() < 4096 and CONFIGS[name].name == "adamw_8bit"
        assert error <= (1e-5 if small else COARSE.get(name) or ALLOWED[name]), (key, error)


def test_a_momentum_is_made_orthogonal():
    matrix = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(orthogonalised(matrix, 5))
    assert float(found.min()) > 0.6
    assert float(found.max()) < 1.3
    turned = orthogonalised(matrix.mT, 5).mT
    torch.testing.assert_close(turned, orthogonalised(matrix, 5), rtol=1e-4, atol=1e-5)


# ---- bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_and_resumed_goes_on_bit_for_bit(config, dtype):
    straight, all_the_way = make(config, dtype=dtype)
    train(straight, all_the_way)
    first, optimizer = make(config, dtype=dtype)
    train(first, optimizer, BATCHES[:5])
    saved = copy.deepcopy((optimizer.named_masters(), optimizer.named_state()))
    second, resumed = make(config, dtype=dtype)
    nn.init.zeros_(second.up.weight)
    resumed.load_masters(saved[0])
    resumed.load_named_state(saved[1])
    train(second, resumed, BATCHES[5:])
    for name, value in values(straight).items():
        assert torch.equal(value, values(second)[name]), name


def test_bf16_weights_move_at_a_rate_that_rounding_to_nearest_would_lose(config):
    """2e-5 of a weight near 1 is a two-hundredth of a bf16 step there."""
    config = config.model_copy(update={"lr": 2e-5, "weight_decay": 0.0})
    gradients = random_gradients(1) * 50
    moved: dict[torch.dtype, dict[str, Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        net, optimizer = make(config, dtype=dtype)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(1.0)
        apply(net, optimizer, gradients)
        moved[dtype] = {n: p.detach().float() - 1 for n, p in net.named_parameters()}
    for name in ("up.weight", "down.weight"):
        wanted, got = moved[torch.float32][name], moved[torch.bfloat16][name]
        assert wanted.abs().max() < 2**-8, "less than half a step of bf16 below 1"
        assert float((got * wanted).sum() / (wanted * wanted).sum()) == pytest.approx(1, abs=0.15), name


# ---- in backward, and elsewhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updating_in_backward_gives_the_same_weights_and_keeps_no_gradient(config, dtype):
    plain, optimizer = make(config, dtype=dtype)
    train(plain, optimizer, BATCHES[:4])
    net, early = make(config.model_copy(update={"in_backward": True}), dtype=dtype)
    held = []
    for batch in BATCHES[:4]:
        net(batch).backward()
        held += [n for n, p in net.named_parameters() if p.grad is not None]
        norm = early.norm_in_backward()
        early.step()
        early.zero_grad()
    assert held == []
    for name, value in values(plain).items():
        assert torch.equal(value, values(net)[name]), name
    plain.zero_grad()
    plain(BATCHES[3])
    assert norm.dtype == torch.float32
    assert norm > 0


def test_the_norm_in_backward_is_that_of_the_whole_gradient():
    net, _ = make(CONFIGS["adamw"])
    net(BATCHES[0]).backward()
    wanted = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
    again, early = make(AdamWConfig(**COMMON, in_backward=True))
    again(BATCHES[0]).backward()
    torch.testing.assert_close(early.norm_in_backward(), wanted)
    assert early.norm_in_backward() == 0, "of the last backward alone"


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
def test_states_that_lie_elsewhere_change_nothing(config, where, compute_dtype, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("rft.optim.home.BUCKET_BYTES", 30_000)  # several buckets, and a tensor larger than one
    plain, optimizer = make(config, compute_dtype=compute_dtype)
    train(plain, optimizer, BATCHES[:4])
    home = Home(where, torch.device("cpu"), tmp_path / "offload")
    net, other = make(config, compute_dtype=compute_dtype, home=home)
    train(net, other, BATCHES[:2])
    saved = copy.deepcopy((other.named_masters(), other.named_state()))
    net, other = make(config, compute_dtype=compute_dtype, home=Home(where, torch.device("cpu"), tmp_path / "offload"))
    other.load_masters(saved[0])
    other.load_named_state(saved[1])
    train(net, other, BATCHES[2:4])
    for name, value in values(plain).items():
        assert torch.equal(value, values(net)[name]), name
    for name, value in optimizer.named_state().items():
        assert torch.equal(value, other.named_state()[name]), name
    if where == "disk":
        assert os.listdir(tmp_path / "offload") == [], "files have no name while they are used"
        assert home.bytes > 0


def test_a_full_disk_is_told_before_a_step(tmp_path: Path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    home = Home("disk", torch.device("cpu"), tmp_path)
    with pytest.raises(ConfigError, match=r"do not fit there: No space left on device"):
        home.keep(torch.zeros(1000))
    assert list(tmp_path.iterdir()) == []


# ---- groups, refusals


def test_lora_plus_multiplies_the_rate_of_B_and_leaves_a_group_of_its_own_alone():
    named = [(f"model.layers.{i}.q_proj.lora_{m}.default.weight", torch.zeros(2, 2)) for i in (0, 1) for m in "AB"]
    config = AdamWConfig(lr=1e-3, lora_plus_ratio=16, groups=[GroupConfig(match=r"layers\.1", lr=5e-4)])
    found = {n[13:25]: g["lr"] for g in parameter_groups(named, config, 1e-3) for n in g["names"]}
    rates = [g["lr"] for g in parameter_groups(named, config, 1e-3) for _ in g["names"]]
    assert sorted(rates) == pytest.approx([5e-4, 5e-4, 1e-3, 1.6e-2]), found


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    _, optimizer = make(CONFIGS["muon"])
    by_rule = {n: type(g["rule"]).__name__ for g in optimizer.param_groups for n in g["names"]}
    assert {n for n, rule in by_rule.items() if rule == "Muon"} == {"up.weight", "down.weight", "experts"}
    assert by_rule["embed.weight"] == by_rule["head.weight"] == by_rule["norm.bias"] == "AdamW"


def test_8_bit_moments_take_a_byte_a_number():
    net, optimizer = make(CONFIGS["adamw_8bit"])
    train(net, optimizer, BATCHES[:1])
    state = {k: v for k, v in optimizer.named_state().items() if k.startswith("up.weight")}
    count = net.up.weight.numel()
    assert sum(v.numel() * v.element_size() for v in state.values()) == 2 * count + 2 * 4 * count // 256 + 4
    assert optimizer.named_state()["norm.weight::exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("library", "paged", "words"),
    [
        ("torchao", False, r"torchao is not installed \(pip install"),
        ("bitsandbytes", True, "need CUDA's managed memory"),
    ],
)
def test_what_a_library_cannot_do_here_is_refused_with_the_way_out(library, paged, words, monkeypatch):
    if library == "torchao":
        monkeypatch.setattr("rft.optim.adamw_8bit.importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match=words):
        make(AdamW8bitConfig(lr=LR, library=library, paged=paged))
