"""Whole runs under ways to save memory: killed and resumed they end as the uninterrupted one that keeps everything; nothing grows."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest

from support.command import Command, metrics, rft, wait_for_step, write_project
from support.ranked import make_run, packs, write_base

pytestmark = pytest.mark.slow

WAYS = '\n[memory]\nrecompute = "selective"\noffload = "disk"\noffload_host = 0.5\noffload_states = "disk"\n'


def weights(folder: Path) -> bytes:
    return (folder / "runs" / "chat" / "final" / "adapter_model.safetensors").read_bytes()


def test_a_killed_run_on_disk_ends_as_the_plain_uninterrupted_one(tmp_path: Path):
    options = {"train": "epochs = 2", "checkpoint": "save_every_steps = 2"}
    plain = write_project(tmp_path / "plain", **options)
    code, out = rft("train", plain, cwd=plain.parent)
    assert code == 0, out
    folder = tmp_path / "killed"
    shutil.copytree(plain.parent, folder, ignore=shutil.ignore_patterns("runs", "sets"))
    (folder / "chat.toml").write_text(plain.read_text() + WAYS)
    command = Command("train", "chat.toml", cwd=folder)
    wait_for_step(folder / "runs" / "chat", 3, command)
    command.kill()
    assert list((folder / "runs" / "chat" / "offload").iterdir()) == [], "files have no name while they are used"
    code, out = rft("train", "chat.toml", cwd=folder)
    assert code == 0, out
    assert [(m["step"], m["loss"]) for m in metrics(folder / "runs" / "chat")] == [
        (m["step"], m["loss"]) for m in metrics(plain.parent / "runs" / "chat")
    ]
    assert weights(folder) == weights(plain.parent)
    receipts = (folder / "runs" / "chat" / "receipts.json").read_text()
    for word in ("attention kept", "offload to disk", "states on disk"):
        assert word in receipts, word


def test_memory_is_flat_over_500_steps(tmp_path: Path):
    """Host memory, the pool, the file and open descriptors after 500 steps are those after 60."""
    from rft.training.step import train_step

    base = write_base(tmp_path / "base")
    run = make_run(
        base, tmp_path / "run", lora=False, num_packs=4,
        memory={"recompute": "selective", "offload": "disk", "offload_host": 2e-5, "offload_states": "cpu", "tiled_mlp": 2},
        optim={"name": "adamw_8bit", "lr": 1e-4, "in_backward": True},
        train={"precision": "fp32", "micro_batch": 1, "max_grad_norm": "none"},
    )  # fmt: skip
    offloader = run.trainee.offloader
    offloader._smallest = 64
    batches = packs(4)
    seen = {}
    for number in range(500):
        train_step(run, [batches[number % 4]])
        if number in (59, 499):
            gc.collect()
            seen[number] = (
                offloader.pool.bytes, offloader.pool.disk.bytes, len(os.listdir("/proc/self/fd")), _resident_bytes()
            )  # fmt: skip
    assert offloader.pool.disk.written_bytes > 0
    assert seen[499][:3] == seen[59][:3]
    assert seen[499][3] <= seen[59][3] + (8 << 20), "resident memory"
    offloader.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
