"""What a log file and a terminal see of a run: few plain lines, units, and the end."""

from __future__ import annotations

from typing import Any

import pytest

from rft.training.live import Progress


def line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train", "step": step, "loss": 0.912, "grad_norm": 0.41, "lr": 1.4e-4, "tokens": 100, "label_tokens": 58,
        "tokens_per_second": 15_842.0, "mfu": 0.51, "memory_peak_bytes": 45.3 * 2**30, "seconds": {"step": 2.0, "data": 0.0},
        **more,
    }  # fmt: skip


def test_plain_lines_are_few_and_the_first_and_the_last_are_there(capsys: pytest.CaptureFixture[str]):
    progress = Progress(200, 0, shown=True)
    for step in range(1, 201):
        progress.train(line(step))
    progress.close()
    shown = capsys.readouterr().out.splitlines()
    assert [text.split()[1] for text in shown] == ["1/200", "200/200"], "200 lines within ten seconds are two"


def test_numbers_carry_units(capsys: pytest.CaptureFixture[str]):
    progress = Progress(236, 117, shown=True)
    progress.evaluation({"loss": 0.934, "step": 100})
    progress.train(line(118))
    text = capsys.readouterr().out
    words = "loss 0.912  grad 0.41  lr 1.4e-4  15,842 tok/s  51 % MFU  45.3 GiB  left 3:56   eval 0.934 (step 100)"
    assert f"step 118/236  {words}" in text
    assert "held-out loss 0.9340 after step 100" in text


def test_a_step_without_labels_and_a_device_without_a_peak_are_said_as_such(capsys: pytest.CaptureFixture[str]):
    progress = Progress(2, 0, shown=True)
    progress.train(line(1, loss=None, mfu=None))
    text = capsys.readouterr().out
    assert "loss none" in text
    assert "label 58 %" in text


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]):
    progress = Progress(1, 0, shown=False)
    progress.evaluation({"loss": 1.0, "step": 0})
    progress.train(line(1))
    assert capsys.readouterr().out == ""


def test_the_first_evaluation_announces_itself_and_long_ones_say_where_they_are(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rft.training.live.time.monotonic", lambda: now[0])
    progress = Progress(10, 0, shown=True)
    for done in range(31):
        progress.evaluating(done, 30)
        now[0] += 1.0
    progress.evaluation({"loss": 1.0, "step": 0})
    progress.evaluating(0, 30)
    assert capsys.readouterr().out.splitlines() == [
        "evaluating the held-out rows before the first step: 30 batches",
        "evaluating 10/30",
        "evaluating 20/30",
        "held-out loss 1.0000 after step 0",
    ]
