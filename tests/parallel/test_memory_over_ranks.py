"""Ways to save memory on two gloo ranks: the losses, norms and weights of one rank that keeps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.parallel.mesh import World
from support.ranked import gathered, make_run, steps, write_base
from support.ranks import run_ranks

WAYS: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "every second": {"recompute": 2},
    "tiled": {"tiled_mlp": 2},
    "offload": {"recompute": "full", "offload": "cpu", "offload_host": 0.5},
    "all together": {"recompute": "selective", "offload": "disk", "tiled_mlp": 2, "offload_host": 0.5},
}
CASES = [
    ("replicate", True, "all together"),
    ("shard", True, "all together"),
    ("shard", False, "all together"),
    ("shard", False, "offload"),
]


def three_steps(root: Path, lora: bool, memory: dict[str, Any], mode: str = "replicate", world: World | None = None):
    options = {"world": world} if world else {}
    memory = {**memory, **({"offload_dir": str(root / "offload")} if memory.get("offload") == "disk" else {})}
    run = make_run(root / "base", root / "run", lora=lora, mode=mode, memory=memory, **options)
    offloader = getattr(run.trainee, "offloader", None)
    if offloader is not None:
        offloader._smallest = 64  # the tiny model's tensors are smaller than what is worth a copy
    made = steps(run, 3)
    assert offloader is None or offloader.moved_bytes > 0
    return made, gathered(run)


def two_ranks(world: World, root: Path) -> dict[Any, Any]:
    return {case: three_steps(root, case[1], WAYS[case[2]], case[0], world) for case in CASES}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def together(root):
    return run_ranks(two_ranks, root)


@pytest.fixture(scope="module")
def alone(root):
    return {lora: three_steps(root, lora, {}) for lora in (True, False)}


@pytest.mark.parametrize(("mode", "lora", "way"), CASES)
def test_two_ranks_that_save_memory_make_the_weights_of_one_that_keeps_all(together, alone, mode, lora, way):
    plain, wanted = alone[lora]
    found = [ranks[mode, lora, way] for ranks in together]
    for number, step in enumerate(plain):
        losses = sum(made[number]["loss"] for made, _ in found)
        assert losses == pytest.approx(step["loss"], rel=1e-5)
        assert found[0][0][number]["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
    for name, value in wanted.items():
        torch.testing.assert_close(found[0][1][name], value, rtol=0, atol=1e-4, msg=name)
        assert torch.equal(found[1][1][name], found[0][1][name]), name


@pytest.mark.parametrize("way", [w for w in WAYS if "tile" not in w and "together" not in w])
def test_one_rank_that_saves_memory_makes_the_same_bits(alone, root, way):
    made, weights = three_steps(root, False, WAYS[way])
    assert made == alone[False][0]
    for name, value in alone[False][1].items():
        assert torch.equal(weights[name], value), name
