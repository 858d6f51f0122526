"""`rft plan`: from a config.json alone, for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rft import cli

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "rows.jsonl").write_text("x" * 420_000)
    path = tmp_path / "chat.toml"
    path.write_text('[model]\npath = "model"\n[[data.train]]\npath = "rows.jsonl"\n')
    return path


def plan(capsys, *arguments: str) -> tuple[int, str]:
    code = cli.run(["plan", "chat.toml", *arguments])
    done = capsys.readouterr()
    return code, done.out + done.err


@pytest.mark.usefixtures("config")
def test_memory_speed_and_reasons_without_weights_or_a_gpu(capsys):
    code, text = plan(capsys, "--gpu", "H200")
    assert code == 0
    for words in ("8.03 B parameters, 41.9 M trained", "weights", "14.96", "activations", "in all", "of 139.80", "tok/s", "memory.recompute = none",
                  "or       recompute", "slower", "measured on an H200"):  # fmt: skip
        assert words in text, words
    assert "about 4 steps" in text  # 100,000 tokens by the size of the file are 3.05 steps, and the last is made too


@pytest.mark.usefixtures("config")
def test_json_has_the_numbers_in_bytes_and_seconds(capsys):
    code = cli.run(["plan", "chat.toml", "--gpu", "H200", "--gpus", "64", "--per-node", "8", "--json", "--set", "parallel.data=shard",
                    "--set", "adapter.name=none", "--set", "train.max_steps=10", "--set", "train.tokens_per_step=1048576"])  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    assert code == 0
    assert made["machine"]["ranks"] == 64
    assert made["memory"]["allocated"]["weights"] == pytest.approx(4 * 8.03e9 / 64, rel=0.01)
    assert made["memory"]["peak_bytes"] == sum(made["memory"]["allocated"].values())
    assert made["step"]["tokens"] == 1_048_576
    assert "waiting for weights" in made["step"]["parts"]
    assert made["run"]["seconds"] == pytest.approx(10 * made["step"]["seconds"])
    assert made["step"]["flops"] == pytest.approx(6 * 7.5e9 * 1_048_576, rel=0.15)
    assert made["reasons"]["train.micro_batch"]["reason"]


@pytest.mark.usefixtures("config")
def test_a_key_that_does_nothing_there_is_told(capsys):
    idle = ["--set", "memory.recompute_layers=4"]
    line = "memory.recompute_layers = 4 has no effect: memory.recompute is none"
    _, text = plan(capsys, "--gpu", "H200", *idle)
    assert line in " ".join(text.split())
    cli.run(["plan", "chat.toml", "--gpu", "H200", "--json", *idle])
    assert json.loads(capsys.readouterr().out)["without_effect"] == [line]


@pytest.mark.usefixtures("config")
def test_what_does_not_fit_names_changes_that_do_and_exits_with_1(capsys):
    code, text = plan(capsys, "--gpu", "H100", "--set", "adapter.name=none")
    assert code == 1
    assert "too much" in text
    assert text.count("\ndo ") >= 2
    assert 'adapter.name = "lora"' in text
    code, text = plan(capsys, "--memory", "16GiB", "--set", "memory.recompute=none")
    assert code == 1
    assert 'set model.base_weights = "nf4"' in text
    assert " and set " in text
    assert "tok/s a GPU" in text


@pytest.mark.usefixtures("config")
def test_no_two_changes_are_named_that_a_config_may_not_have_together(capsys):
    code, text = plan(capsys, "--memory", "4GiB")
    assert code == 1
    (*named, _) = [line for line in text.splitlines() if line.startswith("do ")] or [""]
    assert not any("nf4" in line and "offload_weights" in line for line in text.splitlines() if line.startswith("do "))
    assert all(float(line.split(": ")[-1].split(" GiB")[0]) > 0 for line in named if "GiB" in line)
    code, text = plan(capsys, "--memory", "24GiB")
    assert "train.micro_batch = 1: about" in text
    assert "with more at once more would have to be computed again or moved" in text


@pytest.mark.usefixtures("config")
def test_qlora_fits_where_lora_does_not(capsys):
    assert plan(capsys, "--memory", "10GiB")[0] == 1
    code, text = plan(capsys, "--memory", "10GiB", "--set", "model.base_weights=nf4")
    assert code == 0, text
    assert "dequantising" in text


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no GPU to plan for"), (["--gpu", "Voodoo"], "not in the table"), (["--memory", "lots"], "is no size"),
        (["--probe", "--gpu", "H200"], "runs on this machine"), (["--memory", "1MiB"], "so little"), (["--memory", "9999999GiB"], "so much"),
        (["--gpu", "H200", "--gpus", "64", "--per-node", "7"], "no whole nodes of 7"),
        (["--gpu", "H200", "--gpus", "64", "--per-node", "7"], "--per-node 4, or --gpus 63"),
        (["--gpu", "H200", "--per-node", "8"], "1 GPU in all"), (["--gpu", "H200", "--gpus", "9999999"], "--gpus"),
    ],
)  # fmt: skip
def test_a_machine_that_cannot_be_planned_for_is_refused(capsys, arguments, words):
    import torch

    if torch.cuda.is_available() and not arguments:
        pytest.skip("there is a GPU")
    code, text = plan(capsys, *arguments)
    assert code == 2
    assert words in text


@pytest.mark.usefixtures("config")
def test_fp8_is_refused_where_a_run_would_refuse_it(capsys):
    code, text = plan(capsys, "--gpu", "RTX 3090", "--set", "model.base_weights=fp8")
    assert code == 2
    assert "compute capability 8.9" in text


@pytest.mark.usefixtures("config")
def test_files_that_are_not_here_are_told(capsys):
    code, text = plan(capsys, "--gpu", "H200", "--set", "data.train.0.path=missing.jsonl")
    assert code == 0
    assert "its length is not known: the training files are not here" in text


@pytest.mark.usefixtures("config")
def test_sizes_and_nodes_are_shown_as_they_are(capsys):
    code, text = plan(capsys, "--memory", "0.2GiB")
    assert code == 1
    assert "1x GPU 0.2 GiB" in text
    code = cli.run(["plan", "chat.toml", "--gpu", "H200", "--gpus", "12", "--json"])
    assert (code, json.loads(capsys.readouterr().out)["machine"]["per_node"]) == (0, 6)  # two nodes alike


def test_the_hosts_seconds_are_called_a_guess_until_they_are_measured(config, capsys, monkeypatch):
    from rft.memory.devices import write_calibration

    monkeypatch.setenv("XDG_CACHE_HOME", str(config.parent / "cache"))
    small = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    (config.parent / "model" / "config.json").write_text(json.dumps(LLAMA_8B | small))
    arguments = ("--gpu", "H200", "--set", "train.tokens_per_step=1024", "--set", "data.seq_len=1024")
    code, text = plan(capsys, *arguments)
    assert code == 0
    assert "bound by the host's launches (a guess until" in text
    write_calibration("H200", {"launch": 2e-3}, "2026-01-01")
    text = plan(capsys, *arguments)[1]
    assert "bound by the host's launches" in text
    assert "a guess" not in text
    assert "GB/s each way" not in text
    text = plan(capsys, *arguments, "--set", "memory.recompute=full", "--set", "memory.offload=disk")[1]
    assert "a disk of 1.1 GB/s each way" in text


def test_the_probe_makes_real_steps_shows_them_beside_the_plan_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    from support.command import write_project
    from support.data import some_chats

    write_project(tmp_path, some_chats(12), train="max_steps = 9")
    monkeypatch.chdir(tmp_path)
    way = ("--set", "memory.recompute=full", "--set", "memory.offload=disk")
    before = set(tmp_path.rglob("*"))
    code, text = plan(capsys, "--probe", *way)
    assert code == 0, text
    assert "measured over 3 steps" in text
    made = {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before}
    assert made <= {"sets"}, "the prepared data is kept, and no run"
    assert cli.run(["plan", "chat.toml", "--probe", "--json", "--set", "train.max_steps=2", *way]) == 0
    probe = json.loads(capsys.readouterr().out)["probe"]
    assert probe["steps"] == 2
    assert probe["tokens_per_second"] > 0
    (tmp_path / "train.jsonl").write_text("{}\n")
    code, text = plan(capsys, "--probe")
    assert code == 2
    assert "train.jsonl:1" in text
