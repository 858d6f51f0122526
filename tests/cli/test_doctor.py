"""`rft doctor`: every back-end has its line with the reason, and the line to paste holds what a bug report needs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from rft import __version__, cli


def findings(capsys) -> tuple[int, dict]:
    status = cli.run(["doctor", "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_every_attention_back_end_is_usable_or_says_why_not(capsys):
    _, table = findings(capsys)
    rows = {row["name"]: row for row in table["findings"] if row["topic"] == "attention"}
    assert set(rows) == {"fa4", "cudnn", "varlen", "flex", "sdpa", "math"}
    assert rows["math"]["usable"]
    if not torch.cuda.is_available():
        assert not rows["varlen"]["usable"]
        assert "CUDA" in rows["varlen"]["text"]


def test_the_table_ends_with_the_line_to_paste(capsys):
    status, table = findings(capsys)
    assert cli.run(["doctor"]) == status
    out = capsys.readouterr().out
    line = out.rstrip("\n").splitlines()[-1]
    for part in (
        f"rft {__version__}",
        "Python ",
        f"torch {torch.__version__.split('+')[0]}",
        "transformers ",
        "attention ",
        "GPU ",
    ):
        assert part in line, part
        assert part in table["line"], part


def test_the_disk_where_sets_are_kept_is_named_with_its_speed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, table = findings(capsys)
    sets = next(row for row in table["findings"] if (row["topic"], row["name"]) == ("disk", "sets"))
    assert str(tmp_path) in sets["text"]
    assert "MB/s" in sets["text"]
    (tmp_path / "rft" / "bases").mkdir(parents=True)
    (tmp_path / "rft" / "bases" / "key.safetensors").write_bytes(b"x" * 20_000_000)
    _, table = findings(capsys)
    bases = next(row for row in table["findings"] if (row["topic"], row["name"]) == ("disk", "bases"))
    assert "1 quantised base, 0.02 GB" in bases["text"]


def test_a_disk_that_cannot_be_written_is_told_and_is_no_crash(capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rft.cli.doctor.tempfile.TemporaryFile", refuse)
    from rft.cli import doctor

    usable, text = doctor._write_speed(doctor.Path.cwd(), "here")
    assert (usable, text) == (False, "here, cannot be written: Permission denied")


def test_a_torch_that_cannot_be_imported_is_told_with_exit_1(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    status, table = findings(capsys)
    assert status == 1
    row = next(row for row in table["findings"] if row["topic"] == "torch")
    assert row["usable"] is False
    assert "cannot be imported" in row["text"]


def test_without_the_data_engine_the_status_is_1_and_the_way_to_build_it_is_told(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rft._native", None)
    status, table = findings(capsys)
    assert status == 1
    row = next(row for row in table["findings"] if row["topic"] == "data engine")
    assert "make dev" in row["text"]


def test_calibrating_without_a_gpu_says_where_to_run_it(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.run(["doctor", "--calibrate"]) == 2
    told = capsys.readouterr().err
    assert "this machine has no GPU" in told
    assert "rft plan --gpu" in told
