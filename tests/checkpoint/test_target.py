"""RUN of `rft eval`, `rft chat` and `rft merge`: run directories, adapters and models are told apart."""

from __future__ import annotations

import json

import pytest

from rft.checkpoint.target import find_target
from rft.errors import ConfigError


def a_run(folder, *, final: dict[str, str] | None):
    folder.mkdir()
    (folder / "config.resolved.toml").write_text('[model]\npath = "/models/base.gguf"\nrevision = "main"\n')
    if final is not None:
        (folder / "final").mkdir()
        for name, text in final.items():
            (folder / "final" / name).write_text(text)
    return folder


ADAPTER = {"adapter_config.json": json.dumps({"base_model_name_or_path": "owner/base"})}


def test_lora_run_gives_the_base_of_its_config_and_the_adapter_in_final(tmp_path):
    run = a_run(tmp_path / "run", final=ADAPTER)
    target = find_target(str(run))
    assert (target.kind, target.adapter) == ("run", run / "final")
    assert (target.model.path, target.model.revision) == ("/models/base.gguf", "main")


def test_full_run_gives_the_model_in_final(tmp_path):
    run = a_run(tmp_path / "run", final={"config.json": "{}", "tokenizer.json": "{}"})
    target = find_target(str(run))
    assert (target.adapter, target.model.path) == (None, str(run / "final"))
    assert target.home == run / "final"


def test_adapter_folder_names_its_base_and_its_added_tokens(tmp_path):
    config = {"base_model_name_or_path": "owner/base", "trainable_token_indices": {"embed_tokens": [7, 9]}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    added = [{"id": 5, "content": "<old>"}, {"id": 7, "content": "<a>"}, {"id": 9, "content": "<b>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    target = find_target(str(tmp_path))
    assert (target.kind, target.model.path, target.model.add_tokens) == ("adapter", "owner/base", ["<a>", "<b>"])


def test_model_folder_gguf_file_and_hub_id_are_models(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_target(str(tmp_path)).kind == "model"
    assert find_target("owner/name").model.path == "owner/name"
    assert find_target(str(tmp_path / "x.gguf")).kind == "model"


def test_unfinished_run_says_how_to_go_on(tmp_path):
    with pytest.raises(ConfigError, match="not finished"):
        find_target(str(a_run(tmp_path / "run", final=None)))


@pytest.mark.parametrize("path", ["nothing-here", "."])
def test_anything_else_is_refused_with_what_is_wanted(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        find_target(path)


def test_a_checkpoint_and_a_folder_of_runs_point_at_the_run(tmp_path):
    run = a_run(tmp_path / "run", final=ADAPTER)
    step = run / "checkpoints" / "step-4"
    step.mkdir(parents=True)
    for name in ("complete.json", "config.json"):  # the latter is the run's, not a model's
        (step / name).write_text("{}")
    for path, problem in (
        (step, "is a checkpoint"),
        (step.parent, "holds the checkpoints of a run"),
        (tmp_path, "is no run, but holds one"),
    ):
        with pytest.raises(ConfigError) as raised:
            find_target(str(path))
        assert raised.value.problem.startswith(problem)
        assert str(run) in raised.value.do


@pytest.mark.parametrize("text", ["[]", "{", '{"base_model_name_or_path": 3}', "[" * 9000])
def test_an_adapter_config_that_is_something_else_is_refused_by_name(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config\.json: is not"):
        find_target(str(tmp_path))


def test_a_resolved_config_that_was_changed_by_hand_is_refused_by_name(tmp_path):
    run = a_run(tmp_path / "run", final=ADAPTER)
    for text in ('model = "x"\n', "[model]\npath = 3\n", '[model]\npath = "x"\nnope = 1\n'):
        (run / "config.resolved.toml").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.resolved\.toml: its"):
            find_target(str(run))
