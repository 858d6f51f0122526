"""No secret in a config gets anywhere (BO-44): it is refused at the start, and no message repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft import log
from rft.cli import run
from rft.config.load import load_config
from rft.errors import ConfigError

SECRET = "tok_SYNTHETIC_123"
MINIMAL = '[model]\npath = "org/model"\n[[data.train]]\npath = "rows.jsonl"\n'

PLACES = {
    "hub_token at the top": ("hub_token = '%s'\n" + MINIMAL, "HF_TOKEN"),
    "hub_token in a table": (MINIMAL.replace("[model]", "[model]\nhub_token = '%s'"), "HF_TOKEN"),
    "wandb key in log": (MINIMAL + "[log]\nwandb_api_key = '%s'\n", "WANDB_API_KEY"),
    "password": (MINIMAL + "[log]\npassword = '%s'\n", "an environment variable"),
    "secret": (MINIMAL + "[log]\nmlflow_secret = '%s'\n", "MLFLOW_TRACKING_TOKEN"),
    "in a list item": (MINIMAL + "access_key = '%s'\n", "an environment variable"),
    "in a table of its own": (MINIMAL + "[hub]\ntoken = '%s'\n", "HF_TOKEN"),
}


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "chat.toml"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("verbose", [False, True], ids=["plain", "-v"])
def test_a_secret_in_the_file_is_refused_and_never_shown(toml, capfd, place, verbose):
    text, variable = PLACES[place]
    toml.write_text(text % SECRET)
    assert run(["train", str(toml), *(["-v"] if verbose else [])]) == 2
    out, err = capfd.readouterr()
    assert SECRET not in out + err
    assert "secrets do not belong in a config" in err
    assert variable in err


@pytest.mark.parametrize("verbose", [False, True], ids=["plain", "-v"])
def test_a_secret_in_set_is_refused_and_never_shown(toml, capfd, verbose):
    toml.write_text(MINIMAL)
    assert run(["train", str(toml), "--set", f"log.hub_token={SECRET}", *(["-v"] if verbose else [])]) == 2
    out, err = capfd.readouterr()
    assert SECRET not in out + err


@pytest.mark.parametrize(
    "broken", [f"hub_token = {SECRET}\n", f'hub_token = "{SECRET}\n', f'[x]\nhub_token = ["{SECRET}"\n']
)
def test_a_syntax_error_on_the_line_of_a_secret_does_not_show_it(toml, capfd, broken):
    toml.write_text(broken)
    assert run(["train", str(toml), "-v"]) == 2
    out, err = capfd.readouterr()
    assert SECRET not in out + err


@pytest.mark.parametrize(
    "line",
    [
        'tags = ["hf_abcdefghijklmnopqrstuvwx"]',
        'name = "sk-abcdefghijklmnopqrstuvwx"',
        'project = "https://me:pass1234@host/x"',
    ],
)
def test_a_value_that_looks_like_a_secret_is_refused_under_any_key(toml, line):
    toml.write_text(MINIMAL + f"[log]\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(toml)
    value = line.split('"')[1]
    assert "secrets do not belong in a config" in caught.value.problem
    assert value not in str(caught.value)


@pytest.mark.parametrize("where", ["log.name", "log.tags", "model.path", "train.out"])
def test_the_value_of_a_secret_variable_is_refused_under_any_key(toml, capfd, monkeypatch, where):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    toml.write_text(MINIMAL)
    value = f'["{SECRET}"]' if where == "log.tags" else f"x-{SECRET}"
    assert run(["train", str(toml), "-v", "--set", f"{where}={value}"]) == 2
    out, err = capfd.readouterr()
    assert "secrets do not belong in a config" in err
    assert SECRET not in out + err


def test_a_slip_in_one_of_our_own_keys_is_not_taken_for_a_secret(toml):
    toml.write_text(MINIMAL + "[train]\ntoken_per_step = 4096\n")
    with pytest.raises(ConfigError, match="did you mean 'tokens_per_step'"):
        load_config(toml)


def test_field_and_role_names_of_a_data_set_are_free(toml):
    toml.write_text(MINIMAL + '[data.train.fields]\nprompt = "token"\n[data.train.roles]\nsecret_agent = "assistant"\n')
    assert load_config(toml).data.train[0].roles == {"secret_agent": "assistant"}


def test_secrets_of_the_environment_are_masked_in_every_line_and_in_run_log(tmp_path, capfd, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD"):
        monkeypatch.setenv(name, f"{name}-{SECRET}")
        log.open_run_log(tmp_path / "run.log")
        log.say("model", f"with {name}-{SECRET} in it")
        log.warn(f"{name}-{SECRET}")
        log.error(f"Traceback: {name}-{SECRET}")
        log.close_run_log()
    out, err = capfd.readouterr()
    assert SECRET not in out + err + (tmp_path / "run.log").read_text()
    assert "***" in out
