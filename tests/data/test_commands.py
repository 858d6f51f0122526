"""`rft prepare` and `rft inspect` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from rft import cli
from support.data import STOP, chat, some_chats, write_rows, write_tiny_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512}))
    rows = [*some_chats(30), {"messages": [{"role": "user", "content": "no answer"}]}, chat("Hi", "Hello")]
    write_rows(tmp_path / "chats" / "a.jsonl", rows)
    (tmp_path / "chat.toml").write_text(
        '[model]\npath = "model"\n[data]\nseq_len = 128\nstore = "sets"\n[[data.train]]\npath = "chats/*.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words):
    code = cli.run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_prepare_says_what_became_of_the_rows_and_where_the_set_is(folder, capsys):
    code, out, err = run(capsys, "prepare", "chat.toml")
    assert (code, err) == (0, "")
    assert "32 rows (messages" in out
    assert "31 kept, 1 dropped (no trained token 1)" in out
    assert "packs of 128" in out
    (store,) = [line.split()[-1] for line in out.splitlines() if line.startswith("store")]
    assert (folder / "sets").samefile(store.rsplit("/", 1)[0])
    assert "prepared before" in run(capsys, "prepare", "chat.toml")[1]


def test_prepare_as_json_is_the_report(folder, capsys):
    code, out, _ = run(capsys, "prepare", "chat.toml", "--json", "--set", "data.eval_fraction=0.5")
    report = json.loads(out)
    assert code == 0
    assert report["train"]["kept"] + report["eval"]["kept"] == 31
    assert report["train"]["plan"]["seq_len"] == 128


def test_a_set_found_again_is_told_by_the_files_of_today(folder, capsys):
    run(capsys, "prepare", "chat.toml")
    (folder / "chats" / "a.jsonl").rename(folder / "chats" / "renamed.jsonl")
    out = run(capsys, "prepare", "chat.toml")[1]
    assert "prepared before" in out
    assert "renamed.jsonl" in out
    assert "a.jsonl" not in out


def test_what_a_terminal_would_obey_in_names_and_rows_is_shown_as_numbers(folder, capsys):
    write_rows(folder / "chats" / "\x1b[2Jb.jsonl", [{"messages": [{"role": "a\x1b]0;x\x07", "content": "x"}]}])
    code, out, err = run(capsys, "prepare", "chat.toml")
    assert code == 2
    assert "\x1b" not in out + err
    assert r"\x1b[2Jb.jsonl:1" in err


def test_wrong_row_ends_in_one_block_with_place_and_remedy(folder, capsys):
    write_rows(folder / "chats" / "b.jsonl", [{"messages": [{"role": "asistant", "content": "x"}]}])
    code, out, err = run(capsys, "prepare", "chat.toml")
    assert code == 2
    assert "chats/b.jsonl:1" in err
    assert str(folder) not in err  # as the user wrote it
    assert "asistant" in err
    assert "on_error" in err
    assert "Traceback" not in out + err


def test_inspect_shows_trained_text_counts_lengths_and_dropped_rows(folder, capsys):
    code, out, err = run(capsys, "inspect", "chat.toml", "--rows", "31", "--pack", "0")
    assert (code, err) == (0, "")
    assert f"⟦Hello{STOP}⟧" in out
    assert "trained in 1 span, from chats/a.jsonl:32" in out
    assert "no trained token: 1 (first: " in out
    assert "documents by length in tokens" in out
    assert "pack:" in out


def test_inspect_as_json_holds_the_ids(folder, capsys):
    code, out, _ = run(capsys, "inspect", "chat.toml", "--json", "--rows", "3")
    value = json.loads(out)
    assert code == 0
    assert len(value["samples"]) == 3
    assert sum(bar["documents"] for bar in value["lengths"]) == 31


def test_inspect_writes_a_page(folder, capsys):
    code, out, _ = run(capsys, "inspect", "chat.toml", "--html", "page/i.html", "--pack", "1")
    page = (folder / "page" / "i.html").read_text("utf-8")
    assert code == 0
    assert "page/i.html" in out
    assert "A pack, its documents in order" in page
    assert "Hello" in re.sub("<[^>]*>", "", page)  # a tag each token


@pytest.mark.parametrize("words", [["export"], ["pack", "--seq-len", "64"]])
def test_full_disk_of_what_is_exported_names_that_disk(folder, capsys, words):
    write_rows(folder / "chats" / "a.jsonl", some_chats(3000))
    run(capsys, "prepare", "chat.toml")
    (store,) = [path for path in (folder / "sets").iterdir() if (path / "manifest.json").exists()]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000));"
        "from rft import cli; sys.exit(cli.run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "data", *words, str(store), "--to", "out.parquet"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "out.parquet: no space left" in done.stderr
    assert "--to" in done.stderr
    assert "data.store" not in done.stderr
    assert not list(folder.glob("out*"))


def test_inspect_refuses_a_pack_that_is_not_there(folder, capsys):
    code, _, err = run(capsys, "inspect", "chat.toml", "--pack", "99999")
    assert code == 2
    assert "--pack" in err


def test_model_without_seq_len_takes_the_models_own(folder, capsys):
    text = (folder / "chat.toml").read_text().replace("seq_len = 128\n", "")
    (folder / "chat.toml").write_text(text)
    code, out, err = run(capsys, "prepare", "chat.toml")
    assert (code, err) == (0, "")
    assert "packs of 512" in out
