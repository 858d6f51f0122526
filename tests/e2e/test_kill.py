"""kill -9 at random instants, resumed each time: the run is the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from support.command import Command, metrics, rft, write_project

pytestmark = pytest.mark.slow


def straight_run(folder: Path) -> tuple[list[tuple[int, float, float]], bytes, float]:
    """Losses and rates by step, the adapter, and the seconds from the first to the last step."""
    config = write_project(
        folder, train="epochs = 3\neval_every_steps = 4", checkpoint="save_every_steps = 2", data="eval_fraction = 0.2"
    )
    began = time.monotonic()
    code, out = rft("train", config, cwd=folder)
    assert code == 0, out
    return losses(folder / "runs" / "chat"), adapter(folder), time.monotonic() - began


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["lr"]) for line in metrics(run_dir)]


def adapter(folder: Path) -> bytes:
    return (folder / "runs" / "chat" / "final" / "adapter_model.safetensors").read_bytes()


def test_a_run_that_is_killed_again_and_again_ends_as_the_uninterrupted_one(tmp_path, request):
    kills = request.config.getoption("--kills", default=3)
    expected, weights, seconds = straight_run(tmp_path / "straight")
    folder = tmp_path / "killed"
    shutil.copytree(tmp_path / "straight", folder, ignore=shutil.ignore_patterns("runs", "sets"))
    pick = random.Random(kills)
    seen: dict[int, tuple[int, float, float]] = {}
    found_at = []
    run_dir = folder / "runs" / "chat"
    while len(found_at) < kills:
        if (run_dir / "summary.json").exists():
            shutil.rmtree(run_dir)  # it got through between two kills: once more from the start
        command = Command("train", "chat.toml", cwd=folder)
        if pick.random() < 0.2:  # anywhere: imports, data, weights, training, the end
            time.sleep(pick.uniform(0, seconds))
        else:  # soon after a step was made: steps, evaluations and saves
            have, until = len(metrics(run_dir)), time.monotonic() + seconds
            while len(metrics(run_dir)) <= have and command.process.poll() is None and time.monotonic() < until:
                time.sleep(0.002)
            time.sleep(pick.uniform(0, 0.3))
        command.kill()
        found_at.append(len(metrics(run_dir)))
        for line in losses(run_dir):
            assert seen.setdefault(line[0], line) == line  # a step that is made again gives the same bits
    code, out = rft("train", "chat.toml", cwd=folder)
    assert code == 0, out
    print("steps in metrics.jsonl at the kills:", found_at)
    assert losses(run_dir) == expected
    assert all(line == expected[step - 1] for step, line in seen.items())
    assert adapter(folder) == weights
