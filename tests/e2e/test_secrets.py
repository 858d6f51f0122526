"""A secret of the environment reaches no file and no line of a run, nor of one that fails (BO-44)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.data import some_chats, write_rows, write_tiny_tokenizer
from support.tiny import tiny_llama

SECRET = "tok_SYNTHETIC_123"
CONFIG = """
[model]
path = "model"
[data]
seq_len = 64
eval_fraction = 0.2
[[data.train]]
path = "rows.jsonl"
[train]
max_steps = 2
accumulate = 1
eval_every_steps = 1
out = "out"
[checkpoint]
save_every_steps = 1
[log]
trackers = ["tensorboard"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "model", vocab_size=400)
    write_tiny_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", some_chats(20))
    (tmp_path / "chat.toml").write_text(CONFIG)
    return tmp_path


def train(folder: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "HUB_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "rft", "train", "chat.toml", *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=300, check=False)


def hits(folder: Path, *streams: bytes) -> list[str]:
    """Where the secret stands, in whatever kind of file."""
    found = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    return found + [f"stream {i}" for i, text in enumerate(streams) if SECRET.encode() in text]


def test_a_secret_of_the_environment_stands_in_no_file_and_no_line(folder):
    done = train(folder)
    assert done.returncode == 0, done.stderr.decode()
    assert any((folder / "out" / "checkpoints").iterdir())
    assert any("tfevents" in path.name for path in (folder / "out").rglob("*"))
    assert hits(folder, done.stdout, done.stderr) == []


def test_a_run_that_fails_with_a_traceback_does_not_show_it_either(folder):
    (folder / "model" / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"not json: broken")
    done = train(folder, "-v")
    assert done.returncode in (1, 2), done.stderr.decode()
    assert hits(folder, done.stdout, done.stderr) == []
