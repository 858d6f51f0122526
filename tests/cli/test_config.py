"""`rft config show` and `schema`: what they print is a config with a reason behind every auto, and a schema of it."""

from __future__ import annotations

import contextlib
import io
import json
import tomllib
from pathlib import Path

import pytest

from rft import cli
from rft.config.load import load_config
from support.data import some_chats, write_rows, write_tiny_tokenizer
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    tiny_llama(folder / "model", vocab_size=400)
    write_tiny_tokenizer(folder / "model")
    write_rows(folder / "rows.jsonl", some_chats(4))
    (folder / "chat.toml").write_text('[model]\npath = "model"\n[[data.train]]\npath = "rows.jsonl"\n')
    return folder / "chat.toml"


@pytest.fixture(scope="module")
def shown(toml: Path) -> str:
    """What `rft config show` prints: seconds each time, so once."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.run(["config", "show", str(toml)]) == 0
    return out.getvalue()


def test_show_decides_every_auto_and_gives_the_reason(shown):
    tables = tomllib.loads(shown)
    assert tables["optim"]["lr"] == 2e-4
    assert tables["data"]["seq_len"] == 512
    for path in ("model.attention", "train.precision", "train.micro_batch", "parallel.data", "optim.lr"):
        table, key = path.split(".")
        assert tables[table][key] != "auto"
        line = next(line for line in shown.split(f"[{table}]")[1].splitlines() if line.startswith(f"{key} = "))
        assert "#" in line, f"{path} has no reason"


def test_what_show_prints_can_be_trained_from(toml, shown):
    (toml.parent / "shown.toml").write_text(shown)
    again = load_config(toml.parent / "shown.toml")
    assert again.model.path == str(toml.parent / "model")
    assert again.train.out == str(toml.parent / "runs" / "chat")


def test_set_is_seen_and_json_holds_the_decisions(toml, capsys):
    assert cli.run(["config", "show", str(toml), "--set", "adapter.name=none", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["config"]["optim"]["lr"] == 1e-5
    reasons = {d["key"]: d["reason"] for d in table["decisions"]}
    assert "full fine-tuning" in reasons["optim.lr"]


def test_show_of_a_wrong_config_is_the_error_of_train(toml, capsys):
    assert cli.run(["config", "show", str(toml), "--set", "optim.momentun=1"]) == 2
    assert capsys.readouterr().err.startswith("error  --set optim: unknown key 'momentun'")
