"""Two gloo ranks give the gradients of one, replicated and sharded, trained in full and in part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft.errors import Refused
from rft.parallel import replicate
from rft.parallel.apply import apply_replicate, local_part, parallelize, reduce_gradients, reshard, whole
from rft.parallel.collectives import any_over_ranks, broadcast_json, sum_over_ranks
from rft.parallel.mesh import World
from support.ranks import RankFailed, run_ranks

WIDTH, LAYERS, MICRO_BATCHES = 6, 3, 2


class Layer(nn.Module):
    """A frozen base weight with a low-rank pair beside it, as LoRA has; or everything trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.empty(2, WIDTH))
        self.b = nn.Parameter(torch.empty(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).pow(2).mul(torch.arange(WIDTH) + 1.0).sum()


def build(lora: bool, dtype: torch.dtype = torch.float32) -> Net:
    net = Net()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in net.named_parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.4).to(dtype)
        parameter.requires_grad_(not lora or name.endswith((".a", ".b")))
        if parameter.requires_grad and dtype == torch.bfloat16:
            parameter.grad_dtype = torch.float32
    return net


def batches(rank: int, world_size: int) -> list[Tensor]:
    """Micro-batches of one rank: every world-th of four."""
    ids = torch.arange(4 * MICRO_BATCHES * 5).reshape(-1, 5) % 11
    return list(ids[rank::world_size].split(4 // world_size))


def gradients(net: nn.Module, rank: int, world_size: int) -> dict[str, Tensor | None]:
    own = batches(rank, world_size)
    for batch in own:
        loss = net(batch) / 40
        with reduce_gradients(net, last=batch is own[-1]):
            loss.backward()
    return {n: None if p.grad is None else whole(p.grad).clone() for n, p in net.named_parameters() if p.requires_grad}


def two_ranks(world: World, mode: str, lora: bool, dtype: torch.dtype, bucket_numbers: int) -> dict[str, Tensor | None]:
    replicate.BUCKET_NUMBERS = bucket_numbers
    net = build(lora, dtype)
    names = [name for name, _ in net.named_parameters()]
    if mode == "replicate" and world.rank == 1:
        with torch.no_grad():  # as if this rank had started otherwise: rank 0's values count
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.add_(1)
    parallelize(net, world, mode, layers=list(net.layers))
    if mode == "replicate":
        apply_replicate(net, world)
    assert [name for name, _ in net.named_parameters()] == names
    return gradients(net, world.rank, world.world_size)


CASES = {
    f"{mode} {'lora' if lora else 'full'}": (mode, lora, torch.float32)
    for mode in ("replicate", "shard")
    for lora in (True, False)
} | {"replicate bf16": ("replicate", False, torch.bfloat16), "again": ("replicate", False, torch.float32)}


def all_cases(world: World) -> dict[str, object]:
    # 20 numbers a bucket: several buckets, some with several parameters, some too large for one
    found: dict[str, object] = {name: two_ranks(world, *case, 20) for name, case in CASES.items()}
    return {**found, "facts": sharded_facts(world), "values": small_values(world)}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    """Every case on two ranks; the processes are started once."""
    return run_ranks(all_cases)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_gradients_of_two_ranks_equal_those_of_one(ranks, mode, lora):
    alone = gradients(build(lora), 0, 1)
    first, second = (rank[f"{mode} {'lora' if lora else 'full'}"] for rank in ranks)
    assert first.keys() == alone.keys()
    for name, expected in alone.items():
        if expected is None:
            assert first[name] is None, name
            continue
        assert torch.equal(first[name], second[name]), name
        assert (first[name] - expected).norm() <= 1e-6 * expected.norm(), name
        assert expected.norm() > 0, name


def test_replicas_of_a_bf16_model_sum_gradients_in_fp32(ranks):
    alone = gradients(build(False, torch.bfloat16), 0, 1)
    for name, expected in alone.items():
        if expected is not None:
            got = ranks[0]["replicate bf16"][name]
            assert got.dtype == torch.float32
            assert (got - expected).norm() <= 2e-2 * expected.norm(), name


def test_a_reduction_is_the_same_bits_every_time(ranks):
    one, again = ranks[0]["replicate full"], ranks[0]["again"]
    assert all(torch.equal(one[name], again[name]) for name in one if one[name] is not None)


# ---- sharding


def sharded_facts(world: World) -> dict[str, object]:
    net = build(lora=True)
    expected = dict(build(lora=True).named_parameters())
    parallelize(net, world, "shard", layers=list(net.layers))
    parts = {}
    for name, parameter in net.named_parameters():
        local, slices = local_part(parameter)
        assert torch.equal(local, expected[name].detach()[slices]), name
        parts[name] = local.numel()
    with torch.no_grad():
        net(batches(0, 1)[0])
    unsharded = type(net.embed.weight).__name__
    reshard(net)
    return {"parts": parts, "after evaluation": unsharded, "after reshard": type(net.embed.weight).__name__}


def test_no_rank_holds_a_whole_parameter_and_reshard_undoes_an_evaluation(ranks):
    first, second = (rank["facts"] for rank in ranks)
    sizes = {name: p.numel() for name, p in build(lora=True).named_parameters()}
    assert {name: first["parts"][name] + second["parts"][name] for name in sizes} == sizes
    assert max(first["parts"][name] / size for name, size in sizes.items() if size > 3) <= 0.67
    assert first["after evaluation"] == "Parameter"
    assert first["after reshard"] == "DTensor"


def test_trained_weights_of_two_types_are_refused_when_sharded():
    net = build(lora=True)
    net.layers[1].a.data = net.layers[1].a.data.bfloat16()
    world = World(0, 2, 0, torch.device("cpu"), None)
    with pytest.raises(Refused, match=r"layer 1 trains weights of several types: .*a \(torch.bfloat16\)"):
        parallelize(net, world, "shard", layers=list(net.layers))


# ---- numbers over ranks


def small_values(world: World) -> tuple[object, ...]:
    return (
        sum_over_ranks({"b": world.rank + 0.5, "a": 1e15 + world.rank}, world.group),
        any_over_ranks(world.rank == 1, world.group),
        any_over_ranks(False, world.group),
        broadcast_json({"path": f"from {world.rank}", "n": [1, None]}, world.group),
    )


def test_values_over_ranks_are_the_same_on_all_and_exact(ranks):
    expected = ({"a": 2e15 + 1, "b": 2.0}, True, False, {"path": "from 0", "n": [1, None]})
    assert [rank["values"] for rank in ranks] == [expected] * 2


def fails_on_rank_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("this rank is broken")
    any_over_ranks(True, world.group)


@pytest.mark.slow
def test_run_ranks_tells_the_error_of_the_rank_that_failed():
    with pytest.raises(RankFailed, match=r"this rank is broken|closed"):
        run_ranks(fails_on_rank_one, timeout=60)
