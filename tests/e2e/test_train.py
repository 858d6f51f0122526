"""`rft train` as a user runs it: a TOML in, a run directory out; again, changed, on two ranks, stopped, broken."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import pytest

from rft import cli
from rft.checkpoint.load import find_latest, open_checkpoint
from rft.config.load import load_config
from rft.training.api import train_config
from support.command import Command, metrics, rft, wait_for_step, write_project
from support.data import some_chats

RUN = Path("runs") / "chat"


class Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that is through."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_project(folder, some_chats(12), checkpoint="save_every_steps = 5", data="eval_fraction = 0.2")
    code, out = rft("train", config, cwd=folder)
    assert code == 0, out
    return folder


def test_a_run_leaves_its_directory_and_says_that_it_is_finished_when_it_is_started_again(
    finished, capsys, monkeypatch
):
    run_dir = finished / RUN
    names = {path.name for path in run_dir.iterdir()}
    assert {
        "config.resolved.toml",
        "receipts.json",
        "data.json",
        "metrics.jsonl",
        "run.log",
        "final",
        "checkpoints",
    } <= names
    steps = [line["step"] for line in metrics(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
    assert open_checkpoint(run_dir / "checkpoints" / f"step-{steps[-1]}").state["step"] == steps[-1]
    monkeypatch.chdir(finished)
    assert cli.run(["train", "chat.toml"]) == 0
    out = capsys.readouterr().out
    assert "finished" in out
    assert "--new" in out
    assert [line["step"] for line in metrics(run_dir)] == steps


@pytest.mark.slow
def test_a_changed_config_and_a_pickled_state_are_refused_by_name(finished, tmp_path):
    code, out = rft("train", "chat.toml", "--set", "optim.lr=3e-2", cwd=finished)
    assert code == 2
    assert "optim.lr is 0.03, was 0.01" in out
    assert "--new" in out
    assert "Traceback" not in out
    state = max((finished / RUN / "checkpoints").iterdir(), key=lambda path: int(path.name[5:])) / "state.json"
    written = state.read_bytes()
    state.write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    code, out = rft("train", "chat.toml", cwd=finished)  # BO-42
    state.write_bytes(written)
    assert code == 1
    assert "state.json: the file holds a pickle" in out
    assert not (tmp_path / "marker").exists()


def test_two_ranks_end_by_themselves_with_five_packs_and_count_five(tmp_path):
    """BO-03: five rows of exactly 8 tokens over two ranks."""
    rows = [{"text": character * 7} for character in "~^|{}"]  # 7 tokens and the end token
    data, adapter = 'packing = "none"', "r = 4"

    def project(folder: Path, accumulate: int) -> tuple[Path, list[str]]:
        folder.mkdir()
        sets = ["data.seq_len=8", f"train.accumulate={accumulate}"]
        return write_project(folder, rows, data=data, adapter=adapter), sets

    config, sets = project(tmp_path / "together", 1)
    options = [option for setting in sets for option in ("--set", setting)]
    code, out = rft("train", config, *options, "--cpu-ranks", "2", cwd=tmp_path / "together", timeout=120)
    assert code == 0, out
    config, sets = project(tmp_path / "alone", 2)
    train_config(load_config(config, sets), device="cpu")
    together, alone = (metrics(tmp_path / name / RUN) for name in ("together", "alone"))
    assert [line["tokens"] for line in together] == [line["tokens"] for line in alone]
    assert sum(line["tokens"] for line in together) == 40
    for ours, theirs in zip(together, alone, strict=True):  # three steps; the filler adds nothing
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_sigterm_to_the_launcher_saves_on_all_ranks_and_the_run_goes_on(tmp_path, mode):
    """BO-41."""
    config = write_project(tmp_path, train="epochs = 4", checkpoint="save_every_steps = 1000", adapter="r = 4")
    options = ["--cpu-ranks", "2", "--set", f"parallel.data={mode}"]
    code, out = rft("train", config, *options, "--set", "train.out=straight", cwd=tmp_path)
    assert code == 0, out
    command = Command("train", config, *options, cwd=tmp_path)
    wait_for_step(tmp_path / RUN, 7, command)
    begun = time.monotonic()
    command.process.send_signal(signal.SIGTERM)
    code, out = command.end()
    assert code == 143, out
    assert time.monotonic() - begun < 30
    assert command.descendants() == []
    (path,) = (tmp_path / RUN / "checkpoints").iterdir()
    checkpoint = open_checkpoint(path)
    assert checkpoint.world_size == 2
    assert checkpoint.step == max(line["step"] for line in metrics(tmp_path / RUN)) >= 7
    code, out = rft("train", config, *options, cwd=tmp_path)
    assert code == 0, out
    got = [(line["step"], line["loss"]) for line in metrics(tmp_path / RUN)]
    assert got == [(line["step"], line["loss"]) for line in metrics(tmp_path / "straight")]


@pytest.mark.slow
def test_a_signal_while_it_evaluates_saves_the_step_and_the_run_goes_on_as_if_nothing_was(tmp_path):
    options = {"train": "epochs = 2\neval_every_steps = 2", "data": "eval_fraction = 0.8"}
    config = write_project(tmp_path, some_chats(60), **options)
    code, out = rft("train", config, "--set", "train.out=straight", cwd=tmp_path)
    assert code == 0, out
    for number, expected in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        command = Command("train", config, cwd=tmp_path)
        have = len(metrics(tmp_path / RUN, "eval"))
        wait_for_step(tmp_path / RUN, 2 + 2 * have, command)
        command.process.send_signal(number)
        code, out = command.end()
        assert code == expected, out
    code, out = rft("train", config, cwd=tmp_path)
    assert code == 0, out
    for kind in ("train", "eval"):
        got, straight = (metrics(tmp_path / name, kind) for name in (RUN, "straight"))
        assert [(line["step"], line["loss"]) for line in got] == [(line["step"], line["loss"]) for line in straight]


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_the_earlier_checkpoint_is_intact(tmp_path):
    """BO-41; saves and steps are quick here, so the second signal comes while the first is being obeyed or after it."""
    config = write_project(tmp_path, train="epochs = 40", checkpoint="save_every_steps = 1")
    command = Command("train", config, "--cpu-ranks", "2", cwd=tmp_path)
    wait_for_step(tmp_path / RUN, 3, command)
    for _ in range(2):
        command.process.send_signal(signal.SIGTERM)
        time.sleep(0.6)
    begun = time.monotonic()
    code, out = command.end()
    assert code in (1, 143), out
    assert time.monotonic() - begun < 15
    assert command.descendants() == []
    found = find_latest(tmp_path / RUN)
    assert found is not None
    assert found.step >= 2


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_within_a_minute_with_one_message(tmp_path):
    config = write_project(tmp_path, train="epochs = 40", checkpoint="save_every_steps = 2")
    command = Command("train", config, "--cpu-ranks", "2", cwd=tmp_path)
    wait_for_step(tmp_path / RUN, 3, command)
    (launcher,) = [pid for pid in command.descendants() if pid == command.process.pid]
    os.kill(max(pid for pid in command.descendants() if pid != launcher), signal.SIGKILL)
    begun = time.monotonic()
    code, out = command.end(60)
    assert code == 1, out
    assert time.monotonic() - begun < 60
    assert sum(line.startswith("error ") for line in out.splitlines()) == 1, out
    assert "the process was ended by SIGKILL without a word" in out
    assert command.descendants() == []
    assert find_latest(tmp_path / RUN) is not None


@pytest.mark.slow
def test_rft_works_as_a_worker_of_torchrun_and_stops_for_its_signal(tmp_path):
    config = write_project(tmp_path, train="epochs = 4", adapter="r = 4")
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    program = [*torchrun, sys.executable, "-P", "-m", "rft"]
    command = Command("train", config, cwd=tmp_path, program=program)
    wait_for_step(tmp_path / RUN, 4, command)
    command.process.send_signal(signal.SIGTERM)
    command.end()
    checkpoint = find_latest(tmp_path / RUN)
    assert checkpoint is not None
    assert checkpoint.world_size == 2
    assert checkpoint.step >= 4
    code, out = Command("train", config, cwd=tmp_path, program=program).end()
    assert code == 0, out
    steps = [line["step"] for line in metrics(tmp_path / RUN)]
    assert steps == list(range(1, len(steps) + 1))
    code, out = rft("train", config, cwd=tmp_path)
    assert code == 0
    assert "finished" in out


@pytest.mark.slow
def test_a_broken_row_ends_two_ranks_with_one_message(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "asistant", "content": "Hello"}]}]
    config = write_project(tmp_path, rows)
    command = Command("train", config, "--cpu-ranks", "2", cwd=tmp_path)
    code, out = command.end(60)
    assert code == 2, out
    assert out.count("is not a role") == 1
    assert sum(line.startswith("error ") for line in out.splitlines()) == 1
    assert "Traceback" not in out
    assert command.descendants() == []
