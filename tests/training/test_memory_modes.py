"""Where what goes to disk lies: a folder that cannot be is refused by its key before weights are read, and none is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft import cli
from rft.config.load import load_config
from rft.errors import ConfigError
from rft.training.api import train_config
from support.command import write_project
from support.data import some_chats

DISK = '\n[memory]\nrecompute = "full"\noffload = "disk"\noffload_states = "disk"\n'


@pytest.fixture
def config(tmp_path) -> Path:
    path = write_project(tmp_path, some_chats(6), train="max_steps = 2")
    path.write_text(path.read_text() + DISK)
    return path


def test_the_runs_own_folder_is_gone_when_it_is_over_and_a_folder_of_the_user_stays(config, tmp_path):
    train_config(load_config(config, []), device="cpu")
    run_dir = tmp_path / "runs" / "chat"
    assert "states on disk" in (run_dir / "receipts.json").read_text()
    assert not (run_dir / "offload").exists()
    with pytest.raises(ConfigError, match="warm-up"):  # after the folder was made
        train_config(load_config(config, ["train.max_steps=1", f"train.out={tmp_path}/refused"]), device="cpu")
    assert not (tmp_path / "refused" / "offload").exists()
    (tmp_path / "mine").mkdir()
    train_config(
        load_config(config, [f"memory.offload_dir={tmp_path}/mine", f"train.out={tmp_path}/again"]), device="cpu"
    )
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("mode", ["memory.offload", "memory.offload_states"])
def test_a_folder_that_cannot_be_made_is_refused_by_its_key_before_weights_are_read(
    config, tmp_path, capsys, monkeypatch, mode
):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rft.training.setup.materialise", None)  # calling it would be a TypeError
    other = {"memory.offload": "memory.offload_states", "memory.offload_states": "memory.offload"}[mode]
    code = cli.run(["train", "chat.toml", "--set", "memory.offload_dir=file/sub", "--set", f"{other}=none"])
    told = capsys.readouterr().err
    assert code == 2, told
    assert "memory.offload_dir" in told
    assert "file is a file" in told


def test_of_some_layers_alone_a_run_is_the_same_and_its_receipts_say_of_how_many(config, tmp_path):
    def loss(name: str, **memory) -> float | None:
        options = [f"memory.{key}={value}" for key, value in memory.items()]
        return train_config(load_config(config, [*options, f"train.out={tmp_path}/{name}"]), device="cpu").train_loss

    plain = loss("plain", recompute="none", offload="none", offload_states="none")
    some = loss("some", recompute="full", recompute_layers=1, offload="cpu", offload_layers=1, offload_states="none")
    assert plain is not None
    assert some == plain
    receipts = (tmp_path / "some" / "receipts.json").read_text()
    assert '"offload to cpu"' in receipts
    with pytest.raises(ConfigError, match=r"memory.recompute_layers = 9(.|\n)*decoder layer"):
        loss("many", recompute_layers=9)
