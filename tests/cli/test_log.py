"""Lines, run.log and captured noise."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from rft import log


def test_a_line_has_its_label_in_a_column_and_later_lines_below_the_text(capsys):
    log.say("model", "one\ntwo")
    log.say("declined", "three")
    assert capsys.readouterr().out == "model    one\n         two\ndeclined three\n"


def test_quiet_keeps_warnings_and_verbose_adds_details(capsys):
    for verbosity, expected in ((-1, ["warning"]), (0, ["model", "warning"]), (1, ["model", "detail", "warning"])):
        log.setup(verbosity=verbosity)
        log.say("model", "a")
        log.detail("detail", "b")
        log.warn("c")
        out, err = capsys.readouterr()
        assert [line.split()[0] for line in (out + err).splitlines()] == expected


def test_only_rank_0_speaks_unless_a_line_is_for_all(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    log.setup(rank=1)
    log.say("model", "a")
    log.say("model", "b", all_ranks=True)
    assert capsys.readouterr().out == "model    rank 1: b\n"


def test_json_output_has_stdout_for_itself(capsys):
    log.setup(lines_to_stderr=True)
    log.say("model", "a")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "model    a\n")


def test_run_log_has_our_lines_details_too_and_noise_from_before_it_was_opened(tmp_path, capfd):
    with log.capture_noise():
        print("early noise")
        log.open_run_log(tmp_path / "run.log")
        log.say("model", "ours")
        log.detail("detail", "only there")
        print("late noise")
        os.write(1, b"from C\n")
        warnings.warn("a library's warning", stacklevel=1)
        logging.getLogger("some.library").warning("a library's log line")
        log.close_run_log()
    out, err = capfd.readouterr()
    assert (out, err) == ("model    ours\n", "")
    text = (tmp_path / "run.log").read_text()
    for part in (
        "early noise",
        "ours",
        "only there",
        "late noise",
        "from C",
        "a library's warning",
        "a library's log line",
    ):
        assert part in text, part
    assert text.index("early noise") < text.index("ours") < text.index("late noise")


def test_after_capture_everything_is_as_before(capfd):
    before = sys.stdout, sys.stderr
    with log.capture_noise(), log.capture_noise():
        print("noise")
    assert (sys.stdout, sys.stderr) == before
    print("heard")
    os.write(2, b"heard too\n")
    out, err = capfd.readouterr()
    assert (out, err) == ("heard\n", "heard too\n")


def test_an_error_inside_capture_comes_out_and_streams_are_restored(capfd):
    def fail():
        with log.capture_noise():
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    print("heard")
    assert capfd.readouterr().out == "heard\n"


def test_lines_go_above_a_live_view_through_its_console(capfd):
    with log.capture_noise():
        assert log.console().file is log.stdout()
        log.say("model", "[not markup]")
    assert capfd.readouterr().out == "model    [not markup]\n"


def test_a_terminal_without_utf8_still_gets_the_words(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    log.say("model", "SmolLM2 · 134 M")
    assert stream.buffer.getvalue() == b"model    SmolLM2 ? 134 M\n"


def test_a_native_crash_still_reaches_the_user(tmp_path):
    program = (
        "import os\nfrom rft import log\n"
        "with log.capture_noise():\n    log.open_run_log('run.log')\n    print('noise')\n    os.abort()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Fatal Python error: Aborted" in done.stderr
    assert "noise" not in done.stdout + done.stderr
    assert "noise" in (tmp_path / "run.log").read_text()


def test_nothing_that_a_terminal_obeys_leaves_through_a_line_an_error_a_traceback_or_run_log(tmp_path, capsys):
    bad = "a\x1b[31mb\x9bc\rd\u202ee\x07"
    log.open_run_log(tmp_path / "run.log")
    log.say("data", bad)
    log.warn(bad, do=bad)
    log.error(bad)
    log.trace(ValueError(bad))
    log.record("error", bad)
    log.close_run_log()
    out, err = capsys.readouterr()
    for text in (out, err, (tmp_path / "run.log").read_text()):
        assert not set("\x1b\x9b\r\u202e\x07") & set(text)
    assert "a\\x1b[31mb\\x9bc\\x0dd\\u202ee\\x07" in out
    assert err.count("a\\x1b[31mb") == 4


def test_an_exception_of_a_library_is_shown_without_its_escapes(capsys):
    from rft.cli import run

    assert run(["train", "no\x1b[31msuch.toml"]) == 2
    assert "\x1b" not in capsys.readouterr().err
