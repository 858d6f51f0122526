"""Every optimizer on two gloo ranks: the weights of one rank, replicas that stay equal, checkpoints that go on; or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.checkpoint.load import find_latest
from rft.errors import ConfigError, Refused
from rft.parallel.mesh import World
from rft.training.state import resume_state, save_state
from support.ranked import gathered, make_run, moments, steps, write_base
from support.ranks import run_ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw, bf16 states": {"name": "adamw", "states": "bfloat16", "lr": 1e-2},
    "adamw_8bit": {"name": "adamw_8bit", "lr": 1e-2},
    "adafactor": {"name": "adafactor", "lr": 1e-2},
    "lion": {"name": "lion", "lr": 1e-3},
    "muon": {"name": "muon", "lr": 1e-2},
}
SHARDED = ("adamw, bf16 states", "lion", "muon")
CASES = [*(("replicate", n) for n in ("adamw_8bit", "adafactor")), *(("shard", n) for n in SHARDED)]


def three_steps(root: Path, mode: str, name: str, world: World | None = None) -> dict[str, torch.Tensor]:
    options = {"world": world} if world else {}
    run = make_run(root / "base", root / "run", lora=False, mode=mode, optim=OPTIMIZERS[name], **options)
    steps(run, 3)
    return gathered(run)


def bf16_masters(root: Path, mode: str, world: World) -> dict[str, torch.Tensor]:
    """Weights kept in bf16, on every rank as it holds them."""
    train = {"precision": "bf16", "master": "bfloat16"}
    run = make_run(root / "base", root / "bf16", world, lora=False, mode=mode, train=train)
    steps(run, 3)
    return gathered(run)


def saved_by_two(root: Path, world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    run = make_run(root / "base", root / "saved", world, lora=False, mode="shard", optim=OPTIMIZERS["muon"])
    steps(run, 2)
    save_state(run, "test")
    return gathered(run), moments(run)


def refusals(root: Path, world: World) -> list[str]:
    told = []
    for optim, memory in (
        ({"name": "adamw_8bit"}, {}),
        ({"name": "adafactor"}, {}),
        ({"name": "adamw", "in_backward": True}, {}),
        ({"name": "adamw"}, {"offload_states": "cpu"}),
    ):
        tables: dict[str, Any] = {"optim": optim, "memory": memory, "train": {"max_grad_norm": "none"}}
        with pytest.raises((ConfigError, Refused)) as error:
            make_run(root / "base", root / "no", world, lora=False, mode="shard", **tables)
        told.append(str(error.value))
    return told


def two_ranks(world: World, root: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {case: three_steps(root, *case, world) for case in CASES}
    found |= {("bf16", mode): bf16_masters(root, mode, world) for mode in ("replicate", "shard")}
    return found | {"saved": saved_by_two(root, world), "refused": refusals(root, world)}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def together(root) -> list[dict[Any, Any]]:
    return run_ranks(two_ranks, root)


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_two_ranks_make_the_weights_of_one(together, root, mode, name):
    """Measured by how far training moved them. Sums over ranks are added in another order, and Lion and Adam make a full step
    of a gradient that is nothing but rounding; bf16 states and 8-bit codes round at other places."""
    alone = three_steps(root, "replicate", name)
    start = gathered(make_run(root / "base", root / "start", lora=False))
    allowed = {"adafactor": 1e-3, "muon": 1e-3}.get(name, 2e-2)
    apart = sum(float((together[0][mode, name][k] - v).pow(2).sum()) for k, v in alone.items()) ** 0.5
    moved = sum(float((start[k] - v).pow(2).sum()) for k, v in alone.items()) ** 0.5
    assert apart <= allowed * moved, apart / moved


@pytest.mark.parametrize("case", [*CASES, ("bf16", "replicate"), ("bf16", "shard")], ids=str)
def test_both_ranks_hold_the_same_weights_bit_for_bit(together, case):
    for name, value in together[0][case].items():
        assert torch.equal(value, together[1][case][name]), name


def test_a_sharded_checkpoint_goes_on_in_one_process(together, root):
    weights, states = together[0]["saved"]
    run = make_run(root / "base", root / "saved", lora=False, optim=OPTIMIZERS["muon"])
    checkpoint = find_latest(root / "saved")
    assert checkpoint is not None
    resume_state(run, checkpoint)
    for name, value in gathered(run).items():
        assert torch.equal(value, weights[name]), name
    for name, value in moments(run).items():
        assert torch.equal(value, states[name]), name
    assert {float(v) for k, v in moments(run).items() if k.endswith("::step")} == {2.0}


def test_what_needs_whole_weights_or_one_process_is_refused_by_name(together):
    words = (
        'optim.name = "adamw_8bit"',
        'optim.name = "adafactor"',
        "optim.in_backward = true",
        "memory.offload_states",
    )
    for told, word in zip(together[0]["refused"], words, strict=True):
        assert told.startswith(word), told
        assert "do" in told
