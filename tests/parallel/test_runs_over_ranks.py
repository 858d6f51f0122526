"""One rank and two gloo ranks make the same run, replicated and sharded, LoRA and full: losses, norms, weights, files, checkpoints."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft.checkpoint.load import find_latest, open_checkpoint, read_tensors
from rft.errors import CheckpointError
from rft.parallel.mesh import World
from rft.training.state import resume_state, save_state
from support.ranked import NUM_PACKS, final, folder_of, gathered, make_run, moments, steps, whole_run, write_base
from support.ranks import run_ranks

CASES = [(mode, lora) for mode in ("replicate", "shard") for lora in (True, False)]


def bf16_run(root: Path, mode: str, lora: bool, world: World | None = None) -> dict[str, Any]:
    """Three steps in bf16 with fp32 masters."""
    options = {"world": world} if world else {}
    run = make_run(root / "base", root / "bf16", lora=lora, mode=mode, train={"precision": "bf16"}, **options)
    return {"steps": steps(run, 3), "end": gathered(run)}


def two_ranks(world: World, root: Path) -> dict[Any, dict[str, Any]]:
    found: dict[Any, dict[str, Any]] = {case: whole_run(root, *case, world) for case in CASES}
    return found | {(*case, "bf16"): bf16_run(root, *case, world) for case in CASES}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def together(root) -> list[dict[Any, dict[str, Any]]]:
    return run_ranks(two_ranks, root)


@pytest.fixture(scope="module")
def alone(root) -> dict[bool, dict[str, Any]]:
    return {lora: whole_run(root, "replicate", lora) for lora in (True, False)}


def close(got: torch.Tensor, expected: torch.Tensor, allowed: float) -> bool:
    return bool((got.double() - expected.double()).norm() <= allowed * expected.double().norm())


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_losses_norms_and_weights_of_two_ranks_are_those_of_one(together, alone, mode, lora):
    expected = alone[lora]
    for number, step in enumerate(expected["steps"]):
        shares = [rank[mode, lora]["steps"][number] for rank in together]
        assert sum(share["loss"] for share in shares) == pytest.approx(step["loss"], rel=2e-6)
        assert shares[0]["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        assert shares[0]["grad_norm"] == shares[1]["grad_norm"]
        assert shares[0]["tokens"] == step["tokens"]  # a filler pack counts nothing
    for name, tensor in expected["end"].items():
        ours, theirs = (rank[mode, lora]["end"][name] for rank in together)
        assert torch.equal(ours, theirs), name
        assert close(ours, tensor, 1e-3), name  # AdamW's first steps turn rounding near zero into whole updates


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_a_bf16_run_of_two_ranks_follows_that_of_one_and_keeps_fp32_masters(together, root, mode, lora):
    expected = bf16_run(root, "replicate", lora)
    for number, step in enumerate(expected["steps"]):
        shares = [rank[mode, lora, "bf16"]["steps"][number] for rank in together]
        assert sum(share["loss"] for share in shares) == pytest.approx(step["loss"], rel=2e-3)
        assert shares[0]["grad_norm"] == pytest.approx(step["grad_norm"], rel=5e-2)
    for name, tensor in expected["end"].items():
        ours, theirs = (rank[mode, lora, "bf16"]["end"][name] for rank in together)
        assert ours.dtype == tensor.dtype == torch.float32
        assert torch.equal(ours, theirs), name


def test_no_rank_holds_more_than_its_share_of_a_sharded_run(together):
    for lora in (True, False):
        assert [rank["shard", lora]["largest share"] for rank in together] == [0.5, 0.5]


# ---- rotary tables (BO-33)


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_inverse_frequencies_are_right_on_every_rank(together, mode, lora):
    for rank in together:
        (table,) = {name: t for name, t in rank[mode, lora]["buffers"].items() if "original" not in name}.values()
        assert table.dtype == torch.float32
        assert table.tolist() == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-6)


# ---- files (BO-27)


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_the_adapter_of_two_ranks_is_a_gather_of_them_bit_for_bit(together, root, mode):
    saved = load_file(folder_of(root, mode, True, 2) / "final" / "adapter_model.safetensors")
    assert len(saved) == 8
    assert sum(tensor.numel() for tensor in saved.values()) == 4096
    assert all(tensor.dim() == 2 and tensor.numel() for tensor in saved.values())
    ends = together[0][mode, True]["end"]
    for name, tensor in ends.items():
        inner = name.removeprefix("model.").replace(".default.weight", ".weight")
        assert torch.equal(saved[inner], tensor), name


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_the_model_of_two_ranks_has_the_files_names_and_types_of_its_base(together, root, mode):
    folder = folder_of(root, mode, False, 2) / "final"
    saved, base = load_file(folder / "model.safetensors"), load_file(root / "base" / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        name: (t.shape, t.dtype) for name, t in base.items()
    }
    ends = together[0][mode, False]["end"]
    assert all(torch.equal(tensor, ends[f"model.{name}"]) for name, tensor in saved.items())
    alone_files = {path.name for path in (folder_of(root, mode, False, 2) / "final").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    } <= alone_files


def test_an_adapter_without_numbers_is_an_error_when_it_is_saved(root, tmp_path):
    run = make_run(root / "base", tmp_path / "run")
    for module in run.model.modules():
        for part in ("lora_A", "lora_B"):
            if hasattr(module, part):
                for linear in getattr(module, part).values():
                    linear.weight.data = linear.weight.data[:0]
    run.optimizer._masters.clear()
    with pytest.raises(CheckpointError, match="empty"):
        final(run)
    assert not (run.run_dir / "final").exists()


# ---- checkpoints over other numbers of ranks


def resumed(world: World | None, root: Path, source: tuple[str, bool, int], mode: str) -> dict[str, Any]:
    """A run that goes on from the checkpoint of `source` (mode, lora, ranks), under another mode and number of ranks."""
    saved_mode, lora, ranks = source
    options = {"world": world} if world else {}
    out = root / f"resumed-{saved_mode}-{lora}-{ranks}-{mode}"
    run = make_run(root / "base", out, lora=lora, mode=mode, num_packs=NUM_PACKS, **options)
    resume_state(run, find_latest(folder_of(root, saved_mode, lora, ranks)))
    loaded = {"model": gathered(run), "optimizer": moments(run)}
    position = (run.state.step, run.state.step_in_epoch, run.schedule.lr)
    made = steps(run, 1) if not world or run.packs_per_step % world.world_size == 0 else []
    return {"loaded": loaded, "position": position, "steps": made}


def assert_equal(got: dict[str, dict[str, torch.Tensor]], expected: dict[str, dict[str, torch.Tensor]]) -> None:
    for part in ("model", "optimizer"):
        assert got[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            assert torch.equal(got[part][name], tensor), name


@pytest.mark.parametrize(("mode", "lora"), CASES)
def test_a_checkpoint_of_two_ranks_goes_on_on_one(together, alone, root, mode, lora):
    saved = together[0][mode, lora]["saved"]
    found = resumed(None, root, (mode, lora, 2), "replicate")
    assert_equal(found["loaded"], saved)
    assert found["position"] == (2, 2, 1e-2)
    third = sum(rank[mode, lora]["steps"][2]["loss"] for rank in together)
    assert found["steps"][0]["loss"] == pytest.approx(third, rel=2e-6)
    checkpoint = open_checkpoint(folder_of(root, mode, lora, 2) / "checkpoints" / "step-2")
    assert checkpoint.world_size == 2
    assert {name: t.shape for name, t in read_tensors(checkpoint).items()} == {
        name: t.shape for name, t in saved["model"].items()
    }
    files = sorted(path.name for path in (checkpoint.path / "model").iterdir())
    assert len(files) == (2 if mode == "shard" else 1), files


def three_ranks(world: World, root: Path) -> dict[str, Any]:
    found = {
        f"{mode} {lora}": resumed(world, root, (mode, lora, 2), "shard") for mode, lora in CASES if mode == "shard"
    }
    found["whole"] = resumed(world, root, ("replicate", False, 1), "shard")
    found["full disk"] = full_disk_on_rank_one(world, root)
    return found


def full_disk_on_rank_one(world: World, root: Path) -> tuple[str, list[str]]:
    """The message of a save whose part on one rank finds the disk full, and what is left in the folder."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    run = make_run(root / "base", root / "full disk", world=world, mode="shard")
    save_state(run, "test")
    run.state.step = 5
    if world.rank == 1:

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as told:
        save_state(run, "test")
    return str(told.value), sorted(path.name for path in (root / "full disk" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_sharded_checkpoint_of_two_ranks_and_a_whole_one_load_on_three(together, alone, root):
    ranks = run_ranks(three_ranks, root, world_size=3)
    for rank in ranks:
        for mode, lora in CASES:
            if mode == "shard":
                assert_equal(rank[f"{mode} {lora}"]["loaded"], together[0][mode, lora]["saved"])
        assert_equal(rank["whole"]["loaded"], alone[False]["saved"])
        message, left = rank["full disk"]
        assert "the disk is full" in message or "another rank could not write" in message
        assert left == ["step-0"]
    assert "the disk is full" in ranks[1]["full disk"][0]


# ---- the numbers that the tests above stand on


def test_a_lost_rank_would_be_seen(together, alone):
    """Control: the gradient of one rank's packs alone is far from the whole one."""
    step = alone[True]["steps"][0]
    share = together[0]["replicate", True]["steps"][0]
    assert abs(share["loss"] - step["loss"]) > 0.1 * step["loss"]
    assert math.isfinite(step["grad_norm"])
