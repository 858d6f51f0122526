"""Models whose files are wrong: refused by name, as the user's to mend, before anything is trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.config.load import load_config
from rft.config.model import ModelConfig
from rft.errors import ModelError, RftError
from rft.models.finite import find_bad_tensor
from rft.models.source import find_model
from rft.parallel.mesh import join_world
from rft.training.api import train_config
from rft.training.setup import inspect_job
from support.command import write_project
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"), train="max_steps = 2", data="eval_fraction = 0.2")


@pytest.fixture
def config_json(project) -> Path:
    """The model's config, put back afterwards."""
    path = project.parent / "base" / "config.json"
    before = path.read_bytes()
    yield path
    path.write_bytes(before)


def refused(project: Path) -> RftError:
    with pytest.raises(RftError) as raised:
        inspect_job(load_config(project), join_world("cpu"))
    assert raised.value.exit_code == 2
    return raised.value


@pytest.mark.parametrize(
    "text", ["[]", "null", '"x"', "3", "", "{", "[" * 9000, '{"a": "\udcff"}', '{"a": ' + "1" * 5000 + "}"],
    ids=["list", "null", "string", "number", "empty", "cut off", "deep", "not UTF-8", "a number without end"],
)  # fmt: skip
def test_a_config_json_that_is_none_is_refused_by_name(project, config_json, text):
    config_json.write_bytes(text.encode(errors="surrogateescape"))
    error = refused(project)
    assert str(config_json) in error.where
    assert error.problem.startswith("is n")
    assert error.do


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 3), ("num_attention_heads", 0), ("num_attention_heads", -4), ("num_attention_heads", "4"),
        ("num_key_value_heads", 0), ("num_key_value_heads", 3), ("num_key_value_heads", -2),
        ("hidden_size", 65), ("hidden_size", [64]), ("hidden_size", -64), ("head_dim", 17), ("head_dim", "x"),
        ("intermediate_size", 0), ("num_hidden_layers", 10**7), ("num_hidden_layers", -1),
        ("max_position_embeddings", -5), ("max_position_embeddings", 0), ("max_position_embeddings", "512"),
        ("vocab_size", -1), ("architectures", 3), ("attention_dropout", 2.0), ("sliding_window", "x"),
        ("model_type", "nope"), ("rope_parameters", 3),
    ],
)  # fmt: skip
def test_a_size_that_no_model_can_have_is_told_from_config_json(project, config_json, key, value):
    config_json.write_text(json.dumps({**json.loads(config_json.read_text()), key: value}))
    error = refused(project)
    assert str(config_json) in error.where
    assert "Traceback" not in error.problem


@pytest.mark.parametrize("vocab_size", [10, 300, 500])
def test_a_vocab_size_that_is_not_the_weights_is_refused_whatever_the_tokenizer_has(project, config_json, vocab_size):
    config_json.write_text(json.dumps({**json.loads(config_json.read_text()), "vocab_size": vocab_size}))
    assert "in the checkpoint, [" in refused(project).problem


def test_a_folder_without_a_tokenizer_says_so(tmp_path, project):
    tiny_llama(tmp_path / "bare")
    with pytest.raises(ModelError) as raised:
        inspect_job(load_config(project, [f"model.path={tmp_path / 'bare'}"]), join_world("cpu"))
    assert raised.value.problem == "holds no tokenizer"
    assert "copy the tokenizer's files" in raised.value.do


def test_a_mistyped_path_that_looks_like_a_hub_id_names_what_is_here(tmp_path, monkeypatch):
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as raised:
        find_model(ModelConfig(path="modles/base"))
    assert raised.value.do == "did you mean models/base? It is here"


# ---- weights that are no numbers


def spoil(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "1 NaN"), (float("inf"), "1 infinite")])
@pytest.mark.parametrize("held_out", [True, False], ids=["found by the evaluation", "found by the first step"])
def test_base_weights_that_are_no_numbers_are_named_and_the_learning_rate_is_not_blamed(
    project, tmp_path, value, word, held_out
):
    tensor = "model.layers.1.mlp.down_proj.weight"
    base = tmp_path / "base"
    base.mkdir()
    for file in (project.parent / "base").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    spoil(base, tensor, value)
    sets = [f"model.path={base}", f"train.out={tmp_path / 'run'}", *([] if held_out else ["data.eval_fraction=0"])]
    with pytest.raises(ModelError) as raised:
        train_config(load_config(project, sets), device="cpu")
    assert raised.value.where == f"{base}: {tensor}"
    assert word in raised.value.problem
    assert "optim.lr" not in str(raised.value)


def test_finite_weights_are_not_blamed(tmp_path):
    assert find_bad_tensor(find_model(ModelConfig(path=str(tiny_llama(tmp_path)))).reader) is None


def test_an_adapter_that_is_no_number_is_not_trained_on(project, tmp_path):
    out = tmp_path / "run"
    train_config(load_config(project, [f"train.out={out}"]), device="cpu")
    path = out / "final" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    text = project.read_text().replace("r = 4\ndropout = 0.1", f'path = "{out / "final"}"')
    (project.parent / "on.toml").write_text(text)
    with pytest.raises(ModelError, match="holds NaN or infinities") as raised:
        train_config(load_config(project.parent / "on.toml", [f"train.out={tmp_path / 'on'}"]), device="cpu")
    assert name in raised.value.where


# ---- chat on top of it


def chat(project: Path, *arguments: str, text: bytes | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "rft", "chat", str(project.parent / "base"), *arguments],
        input=text, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text", "block"),
    [
        ([], b"a\xff\xfeb", "error  stdin: is not UTF-8 (byte 1)"),
        (["--prompt", b"a\xff"], None, "error  rft chat --prompt: is not UTF-8"),
        (["--system", b"a\xff"], b"x", "error  rft chat --system: is not UTF-8"),
        (["--seed", "9" * 30], b"x", "error  rft chat --seed: is 999999999999999999999999999999"),
        (["--seed=-1"], b"x", "error  rft chat --seed: is -1"),
        (["--temperature", "1e-300"], b"x", "error  rft chat --temperature: is 1e-300"),
        (["--temperature", "1e300"], b"x", "error  rft chat --temperature: is 1e+300"),
        (["--temperature", "nan"], b"x", "error  rft chat --temperature: is nan"),
        (["--top-p", "nan"], b"x", "error  rft chat --top-p: is nan"),
    ],
)
def test_what_chat_cannot_use_is_one_block_and_exit_2(project, arguments, text, block):
    done = chat(project, *arguments, text=text)
    assert done.returncode == 2
    assert done.stderr.decode().startswith(block)
    assert b"Traceback" not in done.stderr


def test_chat_with_a_broken_model_names_the_tensor_instead_of_inventing_text(project, tmp_path):
    from rft.checkpoint.target import find_target
    from rft.generate.load import load_speaker
    from rft.generate.talk import answer

    base = tmp_path / "base"
    base.mkdir()
    for file in (project.parent / "base").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    spoil(base, "model.norm.weight", float("nan"))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        answer(load_speaker(find_target(str(base))), [{"role": "user", "content": "hi"}])
