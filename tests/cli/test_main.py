"""The command line itself: fast where it has to be, one error block, exit codes."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Annotated

import pytest
import typer

from rft import __version__, cli, errors, log

ROOT = Path(__file__).parents[2]
MINIMAL = '[model]\npath = "org/model"\n[[data.train]]\npath = "rows.jsonl"\n'


@pytest.fixture
def command(monkeypatch):
    """Registers a function as `rft probe` for one test."""

    def register(function):
        monkeypatch.setitem(cli.COMMANDS, "probe", "For a test")
        monkeypatch.setitem(sys.modules, "rft.cli.probe", types.SimpleNamespace(command=function))

    return register


def rft(*args: str, cwd: Path | None = None, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; `code` runs after it, in the same interpreter."""
    program = f"import sys\nfrom rft.cli import run\nstatus = run({list(args)!r})\n{code}\nsys.exit(status)"
    return subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


# ---- help and version


def test_every_command_in_the_help_has_a_module_and_every_module_is_in_the_help():
    modules = {p.stem for p in (ROOT / "python" / "rft" / "cli").glob("*.py")} - {"__init__", "arguments", "start"}
    assert modules == set(cli.COMMANDS)


@pytest.mark.parametrize("args", [["--help"], ["help"], ["-v", "--help"], ["--version"], [], ["config"], ["nonsense"], ["train", "--nonsense"],
                                  ["train", "missing.toml"], ["config", "schema"]], ids=" ".join)  # fmt: skip
def test_no_torch_for_help_version_and_wrong_usage(args, tmp_path):
    check = "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)\nassert not heavy, heavy"
    done = rft(*args, cwd=tmp_path, code=check)
    assert "AssertionError" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "text",
    ["[optim]\nmomentun = 1\n", "[train]\ntokens_per_step = 1\naccumulate = 1\n", "[train]\nprecision = 'fp16'\n"],
)
def test_no_torch_for_a_wrong_config(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "chat.toml").write_text(MINIMAL + text)
    done = rft("train", "chat.toml", cwd=tmp_path, code="assert 'torch' not in sys.modules")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error  chat.toml: ")


def test_importing_rft_imports_nothing_heavy():
    program = "import sys, rft, rft.errors, rft.log, rft.launch\nassert not {'torch', 'numpy', 'pydantic', 'rich', 'typer'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command_with_its_line(capsys):
    assert cli.run(["--help"]) == 0
    out = capsys.readouterr().out
    for name, text in cli.COMMANDS.items():
        assert any(line.split(None, 1) == [name, text] for line in out.splitlines()), name


def test_version_is_the_package_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"rft {__version__}\n"


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"data"}))  # data: the help of the program rft-data
def test_a_command_explains_itself_with_quiet_and_verbose_among_its_options(name, capsys):
    if importlib.util.find_spec(f"rft.cli.{name}") is None:
        pytest.fail(f"rft.cli.{name} is missing")
    group = name == "config"
    assert cli.run([name, *(["show"] if group else []), "--help"]) == 0
    out = capsys.readouterr().out
    assert "--quiet" in out
    assert "--verbose" in out


# ---- wrong usage


@pytest.mark.parametrize(
    ("args", "block"),
    [
        (["trian", "a.toml"], "error  rft: unknown command 'trian'; did you mean 'train'?\n"),
        (["a.toml"], "error  rft: unknown command 'a.toml'\n       do: rft train a.toml\n"),
        (["--colour"], "error  rft: unknown option --colour\n"),
        (["config", "shwo"], "error  rft config: unknown command 'shwo'; did you mean 'show'?\n"),
        (["train", "a.toml", "--sett", "x=1"], "error  rft train: unknown option --sett; did you mean --set?\n"),
        (["train"], "error  rft train: missing argument 'CONFIG'\n"),
        (["train", "a.toml", "--set"], "error  rft train: option '--set' requires an argument\n"),
        (["train", "nowhere.toml"], "error  nowhere.toml: no such file\n"),
    ],
)
def test_wrong_usage_is_one_block_and_exit_2(args, block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(block)
    assert "Traceback" not in err


def test_a_run_directory_in_place_of_a_config_is_told_apart(capsys, tmp_path):
    (tmp_path / "config.resolved.toml").write_text("")
    assert cli.run(["train", str(tmp_path)]) == 2
    assert "this is a run directory" in capsys.readouterr().err


# ---- exit codes and error blocks


KINDS = [
    (errors.ConfigError("a", "b"), 2),
    (errors.DataError("a", "b"), 2),
    (errors.ModelError("a", "b"), 2),
    (errors.Refused("a", "b"), 2),
    (errors.CheckpointError("a", "b"), 1),
    (errors.TrainingError("a", "b"), 1),
    (errors.Stopped("a", "b", exit_code=143), 143),
    (KeyboardInterrupt(), 130),
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), 1),
    (ZeroDivisionError("x"), 1),
]


@pytest.mark.parametrize(("error", "code"), KINDS, ids=lambda v: type(v).__name__)
def test_each_kind_of_error_has_its_exit_code(error, code, command, capsys):
    def fail() -> None:
        raise error

    command(fail)
    assert cli.run(["probe"]) == code
    label = "stopped  " if code in (130, 143) else "error  "
    assert capsys.readouterr().err.startswith(label) or isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (1, 1)])
def test_what_a_command_returns_is_the_exit_code(result, code, command):
    command(lambda: result)
    assert cli.run(["probe"]) == code


def test_typer_exit_is_the_exit_code(command):
    def leave() -> None:
        raise typer.Exit(3)

    command(leave)
    assert cli.run(["probe"]) == 3


def test_an_error_is_a_block_with_where_problem_wanted_and_do(command, capsys):
    def fail() -> None:
        raise errors.DataError("b.jsonl:412", "wrong", wanted="right", do="mend it")

    command(fail)
    cli.run(["probe"])
    assert capsys.readouterr().err == "error  b.jsonl:412: wrong\n       wanted: right\n       do: mend it\n"


def test_verbose_adds_the_traceback_from_any_place_of_the_line(command, capsys):
    def fail() -> None:
        raise errors.DataError("here", "wrong")

    command(fail)
    for args in (["-v", "probe"], ["probe", "--verbose"]):
        cli.run(args)
        assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_named_with_what_to_do(command, capsys):
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")

    command(fail)
    assert cli.run(["probe"]) == 1
    assert capsys.readouterr().err.startswith("error  /data/x: no space left on device\n       do: free some space")


def test_a_bug_shows_the_traceback_and_how_to_report_it(command, capsys):
    def fail() -> None:
        raise ZeroDivisionError("x")

    command(fail)
    assert cli.run(["probe"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: x" in err
    assert "rft doctor" in err


def test_options_of_a_command_arrive_with_verbosity_read(command):
    seen = {}

    def probe(name: Annotated[str, typer.Argument()], count: Annotated[int, typer.Option("--count")] = 1) -> None:
        seen.update(name=name, count=count, verbosity=log.verbosity())

    command(probe)
    assert cli.run(["-q", "probe", "x", "--count", "3"]) == 0
    assert seen == {"name": "x", "count": 3, "verbosity": -1}


def test_library_noise_does_not_reach_the_user_and_our_lines_do(command, capfd):
    def noisy() -> None:
        print("noise from print")
        os.write(2, b"noise from C\n")
        log.say("model", "ours")

    command(noisy)
    assert cli.run(["probe"]) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("model    ours\n", "")
    assert cli.run(["probe", "-v"]) == 0
    out, err = capfd.readouterr()
    assert "noise from print" in out
    assert "noise from C" in err


def test_a_closed_pipe_is_no_error(tmp_path):
    program = "from rft.cli import main; main()"
    done = subprocess.run(f'{sys.executable} -P -c "import sys; sys.argv[1:] = [\'config\', \'schema\']; {program}" | head -1',
                          shell=True, capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


def test_the_schema_command_prints_json(capsys):
    assert cli.run(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "rft config"
