"""RUN of `rft eval`, `rft chat` and `rft merge`: what is not on disk is said first, with what is wanted."""

from __future__ import annotations

import pytest

from rft.cli import run as rft_command
from rft.cli.arguments import find_run

COMMANDS = {"eval": [], "merge": [], "chat": ["-p", "hi"]}


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("run", ["runs/nope", "runs/nope/", "nope", "./nope", "a/b/c", "/nope/nope", "runs/nope.gguf"])
def test_run_that_is_not_on_disk_is_named_with_what_is_wanted(name, run, capsys):
    assert rft_command([name, run, *COMMANDS[name]]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert f"{run}: no such file or directory" in err
    assert "a run directory (config.resolved.toml), an adapter folder" in err
    assert ("a model folder" in err) == (name != "merge")
    # only owner/name can be on the hub, and an adapter to merge is looked for on disk alone
    assert ("taken for a hub id" in err) == (run == "runs/nope" and name != "merge")


def test_hub_model_that_can_be_had_is_a_target(monkeypatch):
    monkeypatch.setattr("rft.models.source.find_model", lambda config: None)
    assert find_run("owner/name").model.path == "owner/name"
