"""`rft.train` from rows to a run directory, on a tiny model: every way of packing, LoRA and full, held-out loss, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rft
from rft.config.load import load_config
from rft.errors import ConfigError, DataError, Stopped
from rft.parallel.mesh import join_world
from rft.training import api, loop, setup
from rft.training.result import Result
from support.data import chat, some_chats, write_rows, write_tiny_tokenizer
from support.reference import train_reference
from support.tiny import tiny_llama

pytest.importorskip("rft._native", reason="the extension is not built")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, bos_id=4, eos_id=2, pad_id=3)
    return write_tiny_tokenizer(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "chats.jsonl", some_chats(60))


@pytest.fixture
def base(model_dir: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model_dir)},
        "adapter": {"name": "lora", "r": 4},
        "data": {"train": [{"path": str(rows)}], "seq_len": 128, "store": str(tmp_path / "sets")},
        "optim": {"lr": 5e-3},
        "train": {"precision": "fp32", "accumulate": 2, "out": str(tmp_path / "run"), "max_steps": 6},
    }


def changed(base: dict[str, Any], **tables: dict[str, Any]) -> dict[str, Any]:
    return {**base, **{table: {**base.get(table, {}), **changes} for table, changes in tables.items()}}


def lines(result: Result, kind: str = "train") -> list[dict[str, Any]]:
    text = (result.run_dir / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def losses(result: Result) -> list[float]:
    return [line["loss"] for line in lines(result)]


@pytest.mark.parametrize("packing", ["stream", "bfd", "none"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_training_lowers_the_held_out_loss_and_leaves_the_whole_run_directory(base, adapter: str, packing: str):
    table = {"name": "none"} if adapter == "none" else base["adapter"]
    config = changed(
        base, data={"packing": packing, "eval_fraction": 0.2}, train={"max_steps": 12, "eval_every_steps": 5}
    )
    result = rft.train({**config, "adapter": table})
    assert (result.status, result.steps) == ("finished", 12)
    assert result.eval_loss < result.eval_loss_before - 0.1
    assert [line["step"] for line in lines(result, "eval")] == [0, 5, 10, 12]
    assert all(torch.isfinite(torch.tensor(losses(result))))
    names = {path.name for path in result.run_dir.iterdir()}
    assert {
        "config.resolved.toml",
        "receipts.json",
        "data.json",
        "metrics.jsonl",
        "report.html",
        "run.log",
        "final",
        "checkpoints",
    } <= names
    weights = "adapter_model.safetensors" if adapter == "lora" else "model.safetensors"
    assert (result.final_dir / weights).is_file()
    data = json.loads((result.run_dir / "data.json").read_text())
    for part in ("train", "eval"):
        assert data[part]["read"] == data[part]["kept"] + sum(data[part]["dropped"].values())


def test_the_resolved_config_trains_the_same_run_again(base, tmp_path: Path):
    first = api.train(base)
    again = load_config(first.run_dir / "config.resolved.toml", [f'train.out="{tmp_path / "again"}"'])
    second = api.train(again)
    assert losses(first) == losses(second)


def test_the_same_config_gives_the_same_losses_bit_for_bit(base, tmp_path: Path):
    first = api.train(base)
    second = api.train(changed(base, train={"out": str(tmp_path / "other")}))
    assert losses(first) == losses(second)
    other = api.train(changed(base, train={"out": str(tmp_path / "seed"), "seed": 1}))
    assert losses(first) != losses(other)


def test_a_finished_run_started_again_says_so_and_changes_nothing(base):
    first = api.train(base)
    before = (first.run_dir / "metrics.jsonl").read_bytes()
    second = api.train(base)
    assert second.status == "already finished"
    assert (second.steps, second.train_loss) == (first.steps, first.train_loss)
    assert (first.run_dir / "metrics.jsonl").read_bytes() == before


def test_new_goes_into_the_next_free_directory(base):
    first = api.train(base)
    checked = load_config(base)
    second = api.train_config(checked, new=True)
    assert second.run_dir == first.run_dir.with_name("run-2")
    assert losses(first) == losses(second)


def test_a_run_that_died_after_its_last_checkpoint_ends_with_its_numbers(base):
    first = api.train(base)
    (first.run_dir / "summary.json").unlink()
    again = api.train(base)
    assert (again.status, again.steps, again.train_loss) == ("finished", 6, first.train_loss)
    assert again.memory_peak_bytes == first.memory_peak_bytes
    assert losses(again) == losses(first)


def test_a_run_of_no_step_is_refused(base):
    config = {**base, "train": {k: v for k, v in base["train"].items() if k != "max_steps"} | {"epochs": 1e-300}}
    with pytest.raises(ConfigError, match="is no step at all"):
        api.train(config)


def test_an_adapter_with_rows_of_added_tokens_goes_on_with_these_tokens_only(base, tmp_path: Path):
    more = changed(base, model={"add_tokens": ["<|new|>"]}, train={"max_steps": 1})
    saved = str(api.train(more).final_dir)
    adapter = {"name": "lora", "path": saved}
    again = changed(more, train={"out": str(tmp_path / "again")}) | {"adapter": adapter}
    assert api.train(again).status == "finished"
    for tokens in ([], ["<|new|>", "<|third|>"]):
        other = changed(again, model={"add_tokens": tokens}, train={"out": str(tmp_path / f"other{len(tokens)}")})
        with pytest.raises(ConfigError, match=r"the adapter at .* trains the rows"):
            api.train(other)


def test_a_finished_run_is_not_passed_off_as_one_on_other_data(base, tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", some_chats(40))
    config = changed(base, data={"train": [{"path": str(path)}]})
    first = api.train(config)
    assert api.train(config).status == "already finished"
    write_rows(path, some_chats(30))
    with pytest.raises(ConfigError, match="training data, its template or tokenizer changed"):
        api.train(config)
    write_rows(path, some_chats(40))
    assert losses(first) == losses(api.train(config))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stopped_run_goes_on_bit_for_bit(base, tmp_path: Path, monkeypatch, precision: str):
    config = changed(
        base,
        adapter={"dropout": 0.1},
        data={"eval_fraction": 0.2},
        train={"precision": precision, "eval_every_steps": 2, "max_steps": 9},
    )
    straight = api.train(changed(config, train={"out": str(tmp_path / "straight")}))
    real = loop.step_within_memory

    def stopping(run, micro_batches):
        result = real(run, micro_batches)
        if run.state.step == 4:
            run.signals.request()
        return result

    monkeypatch.setattr(loop, "step_within_memory", stopping)
    with pytest.raises(Stopped):
        api.train(config)
    monkeypatch.setattr(loop, "step_within_memory", real)
    resumed = api.train(config)
    for key in ("loss", "grad_norm", "lr", "tokens", "epoch"):
        assert [x[key] for x in lines(straight)] == [x[key] for x in lines(resumed)], key
    assert [x["loss"] for x in lines(straight, "eval")] == [x["loss"] for x in lines(resumed, "eval")]
    final = [(r.final_dir / "adapter_model.safetensors").read_bytes() for r in (straight, resumed)]
    assert final[0] == final[1]


def test_twenty_steps_through_the_data_engine_equal_transformers_and_peft(base):
    config = load_config(changed(base, train={"max_steps": 20, "accumulate": 1}, optim={"weight_decay": 0.1}))
    job = setup.inspect_job(config, join_world("cpu"))
    setup.add_data(job, None)
    run = setup.build_run(job, Path(config.train.out), None)
    steps = [list(step) for epoch in range(20) for step in run.loader.steps(epoch, run.packs_per_step)][:20]
    rates = [run.schedule.peaks[0] * run.schedule.lr_ratio(step) for step in range(20)]
    start = {name.removeprefix("model."): t.clone() for name, t in run.optimizer.named_masters().items()}
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    reference = train_reference(config.model.path, steps, rates, lora=lora, initial=start, weight_decay=0.1)
    assert losses(api.train(config)) == pytest.approx(reference.losses, rel=1e-4)


def test_rows_stand_in_for_a_file(base, rows: Path, tmp_path: Path):
    from_file = api.train(base)
    config = changed(base, train={"out": str(tmp_path / "rows")})
    del config["data"]["train"]
    from_rows = api.train(config, rows=[json.loads(line) for line in rows.read_text().splitlines()])
    assert losses(from_file) == losses(from_rows)


def test_early_stop_keeps_the_best_weights(base, monkeypatch):
    config = changed(
        base,
        data={"eval_fraction": 0.2},
        optim={"lr": 0.5},  # far too high: the held-out loss soon rises
        train={"max_steps": 30, "eval_every_steps": 1, "early_stop": {"patience": 2}},
    )
    result = api.train(config)
    assert result.status == "stopped early"
    assert result.steps < 30
    evals = {line["step"]: line["loss"] for line in lines(result, "eval") if line["step"]}
    best = min(evals, key=evals.__getitem__)
    assert (result.final_step, result.eval_loss) == (best, evals[best])


def test_data_whose_every_label_is_masked_never_starts(base, tmp_path: Path):  # BO-10, BO-21
    only_user = write_rows(tmp_path / "user.jsonl", [chat("hello")] * 3)
    with pytest.raises(DataError):
        api.train(changed(base, data={"train": [{"path": str(only_user)}]}))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_truncation_that_leaves_no_label_never_starts_and_a_mixed_set_trains_on_the_rest(base, tmp_path: Path):  # BO-21
    long = {"prompt": " ".join(["word"] * 50), "completion": "yes"}
    short = {"prompt": "Hi", "completion": "yes"}
    data = {"seq_len": 16, "overlong": "truncate"}
    only_long = write_rows(tmp_path / "long.jsonl", [long] * 3)
    with pytest.raises(DataError, match="is left at seq_len 16"):
        api.train(changed(base, data={**data, "train": [{"path": str(only_long)}]}))
    mixed = write_rows(tmp_path / "mixed.jsonl", [long, short])
    alone = write_rows(tmp_path / "alone.jsonl", [short])
    results = [
        api.train(
            changed(
                base,
                data={**data, "train": [{"path": str(path)}]},
                train={"out": str(tmp_path / path.stem), "max_steps": None, "accumulate": 2},
            )
        )
        for path in (mixed, alone)
    ]
    assert losses(results[0]) == pytest.approx(losses(results[1]), rel=1e-5)


def test_no_secret_of_the_environment_is_written_anywhere(base, monkeypatch, capfd, tmp_path: Path):  # BO-44
    secret = "tok_SYNTHETIC_123"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    config = changed(base, train={"max_steps": 2}, log={"trackers": ["tensorboard"]})
    api.train(config)
    with pytest.raises(ConfigError) as refused:
        api.train(changed(config, log={"project": secret}))
    assert secret not in str(refused.value)

    def crash(run, micro_batches):
        raise RuntimeError(f"crash with {secret} in hand")

    monkeypatch.setattr(loop, "step_within_memory", crash)
    with pytest.raises(RuntimeError):
        api.train(changed(config, train={"out": str(tmp_path / "crash")}))
    out = capfd.readouterr()
    assert secret not in out.out + out.err
    for folder in (tmp_path / "run", tmp_path / "crash"):
        for path in folder.rglob("*"):
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path
