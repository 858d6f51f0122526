"""metrics.jsonl survives kills and resumes; nothing secret leaves through trackers or files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft.config.log import LogConfig
from rft.errors import ConfigError
from rft.training import trackers
from rft.training.live import clock, duration, short_rate
from rft.training.metrics import MetricsFile, check_sums


def test_lines_beyond_the_resumed_step_and_torn_ones_are_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    whole = [{"kind": "train", "step": step} for step in range(1, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole) + '{"kind": "train", "st')
    file = MetricsFile(path, resume_step=3)
    file.write({"kind": "train", "step": 4, "again": True})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        *whole[:3],
        {"kind": "train", "step": 4, "again": True},
    ]


DAMAGE = ["{", "[]", "3", '{"kind": "train"}', '{"kind": "train", "step": "2"}', '{"kind": 3, "step": 2}', "[" * 9000,
          '{"kind": "train", "step": 2, "loss": "low"}', '{"kind": "train", "step": 2, "seconds": 3}']  # fmt: skip


@pytest.mark.parametrize("text", DAMAGE, ids=lambda text: text[:40])
def test_a_line_that_was_damaged_by_hand_is_left_out_and_told(tmp_path: Path, capsys, text):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"kind": "train", "step": step, "loss": 1.0, "tokens": 10}) for step in (1, 2, 3)]
    path.write_text("\n".join([whole[0], text, whole[2], whole[0][:9]]))
    file = MetricsFile(path, resume_step=3)
    file.close()
    assert [line["step"] for line in file.kept] == [1, 3]
    told = capsys.readouterr().err
    assert "metrics.jsonl: line 2 is not as rft writes it" in told
    assert "4" not in told.partition("line 2")[2]  # the torn end is what a kill leaves
    check_sums(file.kept, 30)
    assert "accounts for 20 of the 30 tokens" in capsys.readouterr().err
    check_sums(file.kept, 20)
    assert capsys.readouterr().err == ""


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n')
    MetricsFile(path, resume_step=None).close()
    assert path.read_text() == ""


def test_a_tracker_that_is_not_installed_is_refused_with_the_pip_line(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "rft-llm\[wandb\]"'):
        trackers.check_trackers(LogConfig(trackers=["wandb"]))


LINE = {"kind": "train", "step": 3, "loss": 2.0, "mfu": None, "lr": 1e-4, "seconds": {"step": 1.0}}


def test_tensorboard_holds_the_numbers(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = trackers.open_trackers(LogConfig(trackers=["tensorboard"]), tmp_path, "id", {"optim.lr": 1e-4})
    tracker.log(trackers.values_of(LINE), 3)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/lr"]
    (point,) = events.Scalars("train/loss")
    assert (point.step, point.value) == (3, 2.0)


def test_wandb_goes_on_under_the_same_id_after_a_resume(tmp_path: Path, monkeypatch):
    calls: list = []
    run = SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end"))
    fake = SimpleNamespace(init=lambda **kw: calls.append(kw) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tracker,) = trackers.open_trackers(LogConfig(trackers=["wandb"], tags=["a"]), tmp_path / "chat", "abc", {"x": 1})
    tracker.log(trackers.values_of(LINE), 3)
    tracker.close()
    assert (calls[0]["id"], calls[0]["resume"], calls[0]["name"], calls[0]["project"]) == (
        "abc",
        "allow",
        "chat",
        "rft",
    )
    assert calls[1:] == [(3, {"train/loss": 2.0, "train/lr": 1e-4}), "end"]


def test_mlflow_and_trackio_get_the_same_numbers(tmp_path: Path, monkeypatch):
    got: dict[str, list] = {"mlflow": [], "trackio": []}
    mlflow = SimpleNamespace(
        set_experiment=lambda name: None,
        start_run=lambda **kw: None,
        log_params=lambda params: None,
        log_metrics=lambda values, step: got["mlflow"].append((step, values)),
        end_run=lambda: None,
    )
    run = SimpleNamespace(log=lambda values, step: got["trackio"].append((step, values)), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **kw: run))
    for tracker in trackers.open_trackers(LogConfig(trackers=["mlflow", "trackio"]), tmp_path, "id", {}):
        tracker.log(trackers.values_of(LINE), 3)
        tracker.close()
    assert got["mlflow"] == got["trackio"] == [(3, {"train/loss": 2.0, "train/lr": 1e-4})]


def test_every_tracker_of_the_config_has_its_row():
    from typing import get_args

    choices = get_args(get_args(LogConfig.model_fields["trackers"].annotation)[0])
    assert set(choices) == set(trackers.BUILDERS) == set(trackers.EXTRAS)


@pytest.mark.parametrize(("rate", "text"), [(1.4e-4, "1.4e-4"), (2e-5, "2.0e-5"), (0.0, "0"), (1e-10, "1.0e-10")])
def test_rates_are_short(rate: float, text: str):
    assert short_rate(rate) == text


def test_times_read_like_times():
    assert [clock(s) for s in (5, 231, 7431)] == ["0:05", "3:51", "2:03:51"]
    assert [duration(s) for s in (4.2, 292, 7431)] == ["4.2 s", "4 min 52 s", "2 h 3 min"]
