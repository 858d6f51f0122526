"""Who gets a run directory, what a refusal leaves behind, and a report that cannot be written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from rft.config.load import load_config
from rft.errors import ConfigError, TrainingError
from rft.report import write_report
from rft.training import api
from rft.training.api import train_config
from rft.training.resume import LOCK, lock_run_dir, run_status, take_run_dir
from support.command import write_project


def train(toml: Path, *sets: str, **options):
    return train_config(load_config(toml, sets), device="cpu", report=write_report, **options)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"), train="max_steps = 2")


# ---- who gets it


def test_new_runs_that_start_at_once_get_directories_of_their_own(tmp_path):
    out = tmp_path / "chat"
    locks = [take_run_dir(out, new=True) for _ in range(3)]
    assert [lock.run_dir.name for lock in locks] == ["chat", "chat-2", "chat-3"]
    for lock in locks:
        lock.undo()
    assert list(tmp_path.iterdir()) == []


def test_many_threads_with_new_never_share_a_directory(tmp_path):
    taken: list[Path] = []
    start = threading.Barrier(8)

    def take() -> None:
        start.wait()
        for number in range(12):
            lock = take_run_dir(tmp_path / "chat", new=True)
            if number % 3 == 2:
                (lock.run_dir / "config.resolved.toml").write_text("")
                taken.append(lock.run_dir)
                lock.release()
            else:
                lock.undo()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 32
    assert len(set(taken)) == 32


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path):
    first = lock_run_dir(tmp_path / "run")
    os.unlink(tmp_path / "run" / LOCK)  # as a refused run does on its way out
    second = lock_run_dir(tmp_path / "run")
    assert (tmp_path / "run" / LOCK).exists()
    with pytest.raises(ConfigError, match="another run is at work here"):
        lock_run_dir(tmp_path / "run")
    first.release()
    second.release()


# ---- what a refusal leaves


def test_a_refused_run_leaves_nothing_that_was_not_there(project, tmp_path):
    with pytest.raises(ConfigError, match="nope"):
        train(project, f"train.out={tmp_path}/new/deep/run", 'adapter.targets=["nope"]')
    assert list(tmp_path.iterdir()) == []
    own = tmp_path / "mine"
    own.mkdir()
    (own / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="nope"):
        train(project, f"train.out={own}", 'adapter.targets=["nope"]')
    assert [path.name for path in own.iterdir()] == ["notes.txt"]


def test_ctrl_c_before_the_run_begins_leaves_nothing(project, tmp_path, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "add_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(project, f"train.out={tmp_path}/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["file", "file/below/it", "/proc/rft/run", "/dev/null"])
def test_a_place_that_can_be_no_run_directory_is_the_users_to_mend(project, tmp_path, out):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"train\.out: ") as raised:
        train(project, f"train.out={tmp_path / out}")
    assert raised.value.exit_code == 2
    assert raised.value.do
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- the report


def test_a_report_that_meets_a_full_disk_costs_the_page_and_not_the_run(project, tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "report.html.partial").symlink_to("/dev/full")
    result = train(project, f"train.out={run_dir}")
    told = capsys.readouterr()
    assert result.status == "finished"
    assert "the report could not be written" in told.err
    assert "no space left on device" in told.err
    assert run_status(run_dir) == "finished"
    assert not list(run_dir.glob("report.html*"))
    again = train(project, f"train.out={run_dir}")
    assert again.status == "already finished"
    assert "the report was missing: written to" in capsys.readouterr().out
    assert "</html>" in (run_dir / "report.html").read_text()


# ---- memory


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB"),
    ],
    ids=["cpu", "python", "cuda"],
)  # fmt: skip
def test_memory_that_runs_out_is_one_block_and_no_bug(project, tmp_path, monkeypatch, error):
    def full(*_arguments):
        raise error

    monkeypatch.setattr(api, "build_run", full)
    with pytest.raises(TrainingError, match="ran out") as raised:
        train(project, f"train.out={tmp_path}/run")
    assert raised.value.exit_code == 1
    assert "train.micro_batch" in raised.value.do
    assert list(tmp_path.iterdir()) == []
