"""Two NCCL ranks on two GPUs make the run of one GPU: losses, norms, weights, files, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft.checkpoint.load import find_latest
from rft.parallel.mesh import World
from rft.training.state import resume_state
from support.ranked import folder_of, gathered, make_run, steps, whole_run, write_base
from support.ranks import run_ranks

pytestmark = pytest.mark.multi_gpu

CASES = [(mode, lora) for mode in ("replicate", "shard") for lora in (True, False)]


def all_runs(world: World, root: Path) -> dict[Any, dict[str, Any]]:
    found = {case: whole_run(root, *case, world) for case in CASES}
    for mode, lora in CASES:
        run = make_run(root / "base", root / "bf16", world, lora=lora, mode=mode, train={"precision": "bf16"})
        found[mode, lora, "bf16"] = {"steps": steps(run, 3), "end": gathered(run)}
        again = make_run(root / "base", root / "resumed", world, lora=lora, mode=mode, num_packs=11)
        resume_state(again, find_latest(folder_of(root, mode, lora, world.world_size)))
        found[mode, lora, "resumed"] = {"steps": steps(again, 1), "end": gathered(again)}
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict, list[dict]]:
    root = tmp_path_factory.mktemp("nccl")
    write_base(root / "base")
    (alone,) = run_ranks(all_runs, root, world_size=1, device="cuda", timeout=300)
    return root, alone, run_ranks(all_runs, root, world_size=2, device="cuda", timeout=300)


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_two_gpus_follow_one(runs, mode, lora):
    _, alone, together = runs
    for number, step in enumerate(alone[mode, lora]["steps"]):
        shares = [rank[mode, lora]["steps"][number] for rank in together]
        assert sum(share["loss"] for share in shares) == pytest.approx(step["loss"], rel=1e-5)
        assert shares[0]["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
        assert shares[0]["tokens"] == step["tokens"]
    for name, tensor in alone[mode, lora]["end"].items():
        ours, theirs = (rank[mode, lora]["end"][name] for rank in together)
        assert torch.equal(ours, theirs), name
        assert (ours - tensor).norm() <= 1e-2 * tensor.norm(), name


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_two_gpus_in_bf16_follow_one(runs, mode, lora):
    _, alone, together = runs
    for number, step in enumerate(alone[mode, lora, "bf16"]["steps"]):
        shares = [rank[mode, lora, "bf16"]["steps"][number] for rank in together]
        assert sum(share["loss"] for share in shares) == pytest.approx(step["loss"], rel=3e-3)
        assert shares[0]["grad_norm"] == pytest.approx(step["grad_norm"], rel=5e-2)


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_two_gpus_go_on_from_their_checkpoint_as_if_nothing_was(runs, mode, lora):
    _, _, together = runs
    for rank in together:
        assert rank[mode, lora, "resumed"]["steps"][0]["loss"] == pytest.approx(
            rank[mode, lora]["steps"][2]["loss"], rel=1e-6
        )


def test_files_of_two_gpus_are_a_gather_of_them(runs):
    root, _, together = runs
    for mode in ("replicate", "shard"):
        adapter = load_file(folder_of(root, mode, True, 2) / "final" / "adapter_model.safetensors")
        assert len(adapter) == 8
        for name, tensor in together[0][mode, True]["end"].items():
            assert torch.equal(adapter[name.removeprefix("model.").replace(".default", "")], tensor)
        model = load_file(folder_of(root, mode, False, 2) / "final" / "model.safetensors")
        for name, tensor in together[0][mode, False]["end"].items():
            assert torch.equal(model[name.removeprefix("model.")], tensor)
