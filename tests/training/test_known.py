"""`rft config show` from what an earlier call found out: the same decisions, without torch, and never those of another model or machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft.config.load import load_config
from rft.training import known
from rft.training.known import recall
from rft.training.preview import resolve_without_weights
from support.data import write_tiny_tokenizer
from support.tiny import tiny_llama


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_llama(tmp_path / "base", vocab_size=400)
    write_tiny_tokenizer(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')

    def load(*sets: str):
        path = tmp_path / "chat.toml"
        path.write_text('[model]\npath = "base"\n[[data.train]]\npath = "rows.jsonl"\n')
        return load_config(path, list(sets))

    return load


@pytest.mark.parametrize(
    "sets", [(), ("adapter.name=none", "train.precision=fp32"), ("adapter.r=4", "loss.chunk_rows=8")], ids=str
)
def test_the_second_answer_is_the_first_whatever_else_the_config_says(config, sets):
    first = resolve_without_weights(config(*sets))
    assert recall(config(*sets)) is not None
    assert resolve_without_weights(config(*sets)) == first
    resolved, decisions = resolve_without_weights(
        config(
            *sets,
            "optim.lr=0.5",
            "data.seq_len=33",
            "train.early_stop={patience=2}",
            "data.eval_fraction=0.5",
            "train.eval_every_steps=1",
        )
    )
    assert (resolved.optim.lr, resolved.data.seq_len, resolved.checkpoint.final) == (0.5, 33, "best")
    assert {d.key for d in first[1]} - {d.key for d in decisions} == {"optim.lr", "data.seq_len"}


def test_what_the_answer_depends_on_is_asked_anew(config, tmp_path, monkeypatch):
    resolve_without_weights(config())
    assert recall(config()) is not None
    for sets in (("adapter.r=8",), ("adapter.name=none",), ("train.precision=fp32",), ("model.attention=math",)):
        assert recall(config(*sets)) is None, sets
    assert recall(config(), 2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert recall(config()) is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(known, "version", lambda package: "another")
    assert recall(config()) is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert recall(config()) is not None
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 77}))
    assert recall(config()) is None
    assert resolve_without_weights(config())[0].data.seq_len == 77


def test_a_damaged_answer_is_found_out_again(config, tmp_path):
    first = resolve_without_weights(config())
    (path,) = (tmp_path / "cache" / "rft" / "models").glob("*.json")
    for text in ("", "{", "[]", "{}", '{"facts": {"windows": []}}', path.read_text().replace('"kernels"', '"kernel"')):
        path.write_text(text)
        assert recall(config()) is None
    assert resolve_without_weights(config()) == first


def test_config_show_imports_no_torch_the_second_time(config, tmp_path):
    resolve_without_weights(config())
    script = (
        "import sys; from rft.cli import run; code = run(['config', 'show', 'chat.toml']); "
        "print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stderr.strip().splitlines()[-1] == "[]"
    assert 'attention = "sdpa"' in done.stdout
    assert Path(tmp_path, "cache").is_dir()
