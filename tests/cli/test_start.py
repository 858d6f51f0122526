"""What is checked before anything heavy is imported, and how the command ends where its surroundings are broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rft.errors import ConfigError
from rft.ranks import Ranks, read_ranks

RFT = (sys.executable, "-P", "-m", "rft")


def rft(*arguments: str, cwd: Path | None = None, **options) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | options.pop("env", {})
    return subprocess.run(
        [*RFT, *arguments], cwd=cwd, env=environment, text=True, timeout=60, check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )  # fmt: skip


# ---- the launcher's variables


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1e3"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 30}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT"),
    ],
    ids=str,
)
def test_variables_that_no_launcher_sets_are_refused_by_name(environ, named):
    with pytest.raises(ConfigError) as raised:
        read_ranks(environ)
    assert raised.value.where == f"environment variable {named}"
    assert raised.value.wanted
    assert raised.value.do


def test_what_torchrun_sets_is_read():
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert read_ranks(environ) == Ranks(3, 8, 1)
    assert read_ranks({"RANK": "0", "WORLD_SIZE": "1"}) == Ranks(0, 1, 0)
    assert read_ranks({}) == Ranks()


def test_a_nonsensical_rank_is_one_block_and_help_works_all_the_same(tmp_path):
    done = rft("train", "x.toml", cwd=tmp_path, env={"RANK": "abc", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert done.stderr.startswith("error  environment variable RANK: is 'abc'\n")
    assert rft("--help", env={"RANK": "abc"}).returncode == 0


# ---- folder, home, encoding


def test_a_removed_current_directory_is_told_before_a_library_dies_of_it(tmp_path):
    program = f"import os, sys; os.chdir({str(tmp_path)!r}); os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
    program += "sys.argv = ['rft', 'train', '/x.toml']\nfrom rft.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error  the current directory: does not exist any more")


def test_an_empty_home_counts_as_none():
    program = (
        "import os\nfrom rft.cli.start import prepare_process\nprepare_process()\nprint(os.path.expanduser('~/.cache'))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "HOME": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() != "/.cache"
    assert done.stdout.strip().endswith("/.cache")


def test_names_beyond_ascii_survive_a_posix_locale(tmp_path):
    folder = tmp_path / "日本"
    folder.mkdir()
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = rft("train", str(folder / "nichts-ü.toml"), env=posix, encoding="utf-8")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error  {folder / 'nichts-ü.toml'}: no such file")


# ---- streams


@pytest.mark.parametrize("arguments", [["config", "schema"], ["--help"], ["train", "--help"]], ids=" ".join)
def test_a_stdout_that_cannot_be_written_is_one_block_and_exit_1(arguments):
    with open("/dev/full", "w") as full:
        done = rft(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error  stdout: cannot be written: no space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_lines_that_cannot_be_shown_are_told_once_and_stop_nothing():
    program = "from rft import log\nfor _ in range(3): log.line('a line')\nimport sys; sys.exit(7)"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 7
    assert done.stderr.count("stdout cannot be written (no space left on device)") == 1


def test_a_closed_stdout_is_none_that_later_files_are_written_to(tmp_path):
    command = " ".join([*RFT, "config", "schema"])
    done = subprocess.run(f"{command} >&-", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- SIGTERM


def ends_by_sigterm(work: str) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of a process that gets SIGTERM while it does `work`."""
    program = (
        "import sys, types\nfrom rft import cli\nfrom rft.cli.start import prepare_process\nprepare_process()\n"
        f"def work() -> None:\n    print('ready', file=sys.__stdout__, flush=True)\n    {work}\n"
        "cli.COMMANDS['work'] = ''\nsys.modules['rft.cli.work'] = types.SimpleNamespace(command=work)\n"
        "sys.exit(cli.run(['work', '-v']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.monotonic() - began


def test_sigterm_before_training_listens_unwinds_and_is_no_error():
    code, err, seconds = ends_by_sigterm("__import__('time').sleep(50)")
    assert code == 143
    assert err.splitlines()[-1] == "stopped  by SIGTERM"
    assert "error" not in err.splitlines()[-1]
    assert seconds < 2.5


def test_sigterm_ends_a_process_that_is_deep_in_native_code():
    code, _, seconds = ends_by_sigterm("__import__('hashlib').pbkdf2_hmac('sha256', b'x', b'y', 10**9)")
    assert code == 143
    assert seconds < 20


def test_schema_still_comes_out_whole():
    assert json.loads(rft("config", "schema").stdout)["title"] == "rft config"
