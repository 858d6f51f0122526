"""Going on: the same bits as without a stop; what may change; what is refused, by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rft.config.root import Config
from rft.errors import CheckpointError, ConfigError
from rft.training.resume import (
    RESOLVED,
    accumulate_on_resume,
    begin,
    choose_run_dir,
    lock_run_dir,
    mark_finished,
    run_status,
)
from rft.training.run import Run
from rft.training.signals import Signals
from rft.training.state import Rng, TrainState, load_weights, resume_state, save_state
from rft.training.step import GivenUp, train_step
from support.stub_run import TinyModel, pack, stub_config, stub_run


class NoisyModel(TinyModel):
    """Draws from every generator in each forward, and keeps a running buffer beside trained weights."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.linear.register_buffer("seen", torch.zeros(1))

    def backbone(self, batch):
        hidden, _ = super().backbone(batch)
        self.linear.seen += 1
        noise = torch.randn(hidden.shape) + random.random() + float(np.random.rand()) + self.linear.seen
        return nn.functional.dropout(hidden, 0.3) + 0.1 * noise, None


PACKS = [pack([1 + (i * j) % 15 for j in range(1, 7)]) for i in range(1, 13)]


def noisy_run(tmp_path: Path, **tables) -> Run:
    random.seed(1)
    np.random.seed(1)
    run = stub_run(tmp_path, PACKS, model=NoisyModel(), packs_per_step=2, **tables)
    torch.manual_seed(1)
    run.state.plan_hash = run.loader.plan(0).hash
    return run


def go(run: Run, until: int) -> list[float]:
    losses = []
    for micro_batches in run.loader.steps(0, run.packs_per_step, start_step=run.state.step_in_epoch):
        if run.state.step == until:
            break
        losses.append(float(train_step(run, micro_batches).terms["next_token"]))
        run.state.step += 1
        run.state.step_in_epoch += 1
    return losses


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.trainee.state_dict().items()}


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path, stop):
    schedule = {"schedule": {"name": "linear", "warmup_steps": 2}, "lr": 1e-2}
    straight = noisy_run(tmp_path / "straight", optim=schedule)
    expected = go(straight, 6)
    first = noisy_run(tmp_path / "stopped", optim=schedule)
    losses = go(first, stop)
    save_state(first, "test")
    second = noisy_run(tmp_path / "stopped", optim=schedule)
    if stop > 0:
        go(second, 2)  # whatever happened in this process before does not count
    resume_state(second, begin(second.run_dir, second.config).checkpoint)
    assert second.state.step == stop
    losses += go(second, 6)
    assert losses == expected
    assert all(torch.equal(weights(second)[name], tensor) for name, tensor in weights(straight).items())
    assert second.schedule.lr == straight.schedule.lr


def test_a_step_that_is_given_up_between_micro_batches_is_made_again_with_the_same_bits(tmp_path):
    expected = go(noisy_run(tmp_path / "straight"), 6)
    first = noisy_run(tmp_path / "stopped")
    losses = go(first, 3)
    first.signals = Signals()
    first.signals.long_steps = True
    calls = []

    def forward_then_signal(module, args) -> None:
        calls.append(module)
        if len(calls) == 1:  # the signal comes in the first of two micro-batches
            first.signals.request()

    hook = first.trainee.register_forward_pre_hook(forward_then_signal)
    with pytest.raises(GivenUp):
        go(first, 4)
    hook.remove()
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in first.trainee.parameters())
    save_state(first, "SIGTERM")
    second = noisy_run(tmp_path / "stopped")
    resume_state(second, begin(second.run_dir, second.config).checkpoint)
    assert losses + go(second, 6) == expected


def test_every_generator_comes_back_from_json():
    state = Rng.from_json(json.loads(json.dumps(Rng.capture().to_json())))
    np.random.standard_normal()  # leaves half of a pair behind
    state = Rng.from_json(json.loads(json.dumps(Rng.capture().to_json())))
    first = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal(), torch.rand(3).tolist())
    state.restore()
    assert first == (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(3).tolist(),
    )


def test_the_linear_rates_of_ten_steps_are_the_same_after_a_stop_at_five(tmp_path):
    """BO-25."""
    expected = [1e-5, 9e-6, 8e-6, 7e-6, 6e-6, 5e-6, 4e-6, 3e-6, 2e-6, 1e-6]

    def new_run() -> Run:
        optim = {"lr": 1e-5, "schedule": {"name": "linear", "warmup_steps": 0}}
        return stub_run(tmp_path, PACKS[:10], optim=optim)

    def rates(run: Run, until: int) -> list[float]:
        found = []
        for micro_batches in run.loader.steps(0, 1, start_step=run.state.step_in_epoch):
            if run.state.step == until:
                break
            found.append(train_step(run, micro_batches).lr)
            run.state.step += 1
            run.state.step_in_epoch += 1
        return found

    straight = rates(new_run(), 10)
    assert straight == pytest.approx(expected, rel=1e-12)
    first = new_run()
    before = rates(first, 5)
    save_state(first, "test")
    second = new_run()
    resume_state(second, begin(second.run_dir, second.config).checkpoint)
    assert before + rates(second, 10) == straight


def test_only_the_trained_tensors_of_a_step_come_back_for_final_best(tmp_path):
    run = noisy_run(tmp_path, checkpoint={"keep_last": 9})
    go(run, 2)
    save_state(run, "test")
    best = weights(run)
    go(run, 6)
    save_state(run, "test")
    load_weights(run, 2)
    assert all(torch.equal(weights(run)[name], tensor) for name, tensor in best.items())
    assert run.state.step == 6


# ---- what does not fit any more


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: setattr(run, "packs_per_step", 3), "a step has 3 packs now, and had 2 when the run started"),
        (lambda run: run.loader.packs.pop(), "the training data, its template or tokenizer changed"),
        (lambda run: setattr(run.state, "eval_key", "other"), "the held-out data changed"),
    ],
    ids=["packs of a step", "training data", "held-out data"],
)
def test_other_data_or_steps_are_refused_before_anything_is_changed(tmp_path, change, told):
    first = noisy_run(tmp_path)
    first.state.eval_key = "some"
    go(first, 2)
    save_state(first, "test")
    second = noisy_run(tmp_path)
    second.state.eval_key = "some"
    change(second)
    before = weights(second)
    with pytest.raises(ConfigError, match=told):
        resume_state(second, begin(second.run_dir, second.config).checkpoint)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(second).items())


def saved_run(tmp_path: Path, **tables) -> Path:
    run = noisy_run(tmp_path, **tables)
    go(run, 2)
    save_state(run, "test")
    return run.run_dir


def changed(tmp_path: Path, **tables) -> Config:
    return stub_config(tmp_path, **tables)


ALLOWED = [
    {"log": {"every_steps": 7}},
    {"checkpoint": {"final": "last", "keep_last": 9, "save_every_steps": 3}},
    {"parallel": {"data": "shard"}},
    {"train": {"eval_every_steps": 3}},
    {"train": {"out": "elsewhere"}},
    {"data": {"cache_gb": 5.0}},
    {"model": {"cache_gb": 0.0}},
    {"data": {"train": [{"path": "moved.jsonl"}]}},  # what is in it is compared by the plan's hash
]
REFUSED = [
    ({"optim": {"lr": 3e-2}}, r"optim\.lr is 0\.03, was 0\.01"),
    ({"data": {"seq_len": 16}}, r"data\.seq_len is 16, was 8"),
    ({"train": {"seed": 5}}, r"train\.seed is 5, was 0"),
    ({"train": {"accumulate": 4}}, r"train\.accumulate is 4, was 1"),
    ({"adapter": {"name": "lora", "r": 4}}, r'adapter\.name is "lora", was "none"; .*adapter\.r is 4, was not set'),
    ({"train": {"epochs": 0.5}}, r"train\.epochs is 0\.5, was 1\.0"),
    ({"data": {"train": [{"path": "stub.jsonl"}, {"path": "more.jsonl"}]}}, r"data\.train\.1\.format"),
    ({"optim": {"lr": 3e-2}, "data": {"seq_len": 16}}, r"data\.seq_len is 16, was 8; optim\.lr is 0\.03"),
]


@pytest.mark.parametrize("tables", ALLOWED, ids=str)
def test_these_may_change_when_a_run_goes_on(tmp_path, tables):
    run_dir = saved_run(tmp_path)
    start = begin(run_dir, changed(tmp_path, **tables))
    assert (start.kind, start.checkpoint.step) == ("resume", 2)


@pytest.mark.parametrize(("tables", "told"), REFUSED, ids=[str(tables) for tables, _ in REFUSED])
def test_everything_else_is_refused_with_the_keys_and_the_command(tmp_path, tables, told):
    run_dir = saved_run(tmp_path)
    with pytest.raises(ConfigError, match=told) as error:
        begin(run_dir, changed(tmp_path, **tables))
    assert "--new" in error.value.do
    assert f"{run_dir}-2" in error.value.do


@pytest.mark.parametrize("schedule", ["constant", "wsd", "linear", "cosine"])
@pytest.mark.parametrize("longer", [{"epochs": 2.0}, {"max_steps": 9}], ids=str)
def test_a_run_grows_only_under_a_schedule_that_does_not_depend_on_its_end(tmp_path, schedule, longer):
    optim = {"optim": {"schedule": {"name": schedule, "warmup_steps": 0}}}
    run_dir = saved_run(tmp_path, **optim, train={"max_steps": 6})
    config = changed(tmp_path, **optim, train={"max_steps": 6, **longer})
    if schedule in ("constant", "wsd"):
        start = begin(run_dir, config)
        assert start.kind == "resume"
        assert next(iter(longer)) in start.notes[0]
        mark_finished(run_dir, {"steps": 6})
        assert begin(run_dir, config).kind == "resume"  # a finished run goes on too
        again = noisy_run(tmp_path, **optim, train={"max_steps": 6, **longer})
        resume_state(again, begin(run_dir, config).checkpoint)
        save_state(again, "test")
        assert run_status(run_dir) == "unfinished"  # and is not taken for finished if it is killed on the way
        assert begin(run_dir, config).kind == "resume"
    else:
        with pytest.raises(
            ConfigError,
            match=f"train.{next(iter(longer))} is .* \\(a {schedule} schedule is a function of all its steps",
        ):
            begin(run_dir, config)


def test_another_number_of_ranks_deals_accumulate_out_anew(tmp_path):
    run_dir = saved_run(tmp_path)
    config = changed(tmp_path, train={"accumulate": 2})
    assert begin(run_dir, config, world_size=2).kind == "resume"
    assert accumulate_on_resume(8, 1, 4) == 2
    with pytest.raises(ConfigError, match=r"has 8 packs, which 3 processes with micro_batch 2 cannot share") as error:
        accumulate_on_resume(8, 2, 3)
    assert error.value.wanted.startswith("1, 2, 4 processes")


# ---- run directories


def test_a_finished_run_says_so_and_an_unfinished_one_without_checkpoints_starts_over(tmp_path):
    config = stub_config(tmp_path)
    run_dir = tmp_path / "run"
    assert begin(run_dir, config).kind == "fresh"
    run_dir.mkdir()
    (run_dir / RESOLVED).write_text("")
    assert run_status(run_dir) == "unfinished"
    start = begin(run_dir, config)
    assert (start.kind, start.checkpoint) == ("fresh", None)
    assert "before its first checkpoint" in start.notes[0]
    saved_run(tmp_path)
    mark_finished(run_dir, {"steps": 6})
    assert begin(run_dir, config).kind == "finished"
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        begin(run_dir, changed(tmp_path, optim={"lr": 3e-2}))


def test_new_takes_the_next_free_directory(tmp_path):
    out = tmp_path / "chat"
    assert choose_run_dir(out, new=True) == out
    for name in ("chat", "chat-2", "chat-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RESOLVED).write_text("")
    assert choose_run_dir(out, new=False) == out
    assert choose_run_dir(out, new=True) == tmp_path / "chat-4"


def test_resume_never_refuses_an_unfinished_run(tmp_path):
    run_dir = saved_run(tmp_path)
    with pytest.raises(ConfigError, match=r'checkpoint\.resume is "never"'):
        begin(run_dir, changed(tmp_path, checkpoint={"resume": "never"}))


def test_two_runs_cannot_work_in_one_directory(tmp_path):
    lock = lock_run_dir(tmp_path / "run")
    with pytest.raises(ConfigError, match="another run is at work here"):
        lock_run_dir(tmp_path / "run")
    lock.release()
    lock_run_dir(tmp_path / "run").release()


def test_a_summary_that_is_a_pickle_is_refused_by_name(tmp_path):
    run_dir = saved_run(tmp_path)
    (run_dir / "summary.json").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match=r"summary\.json: the file holds a pickle"):
        begin(run_dir, stub_config(tmp_path))


def test_a_state_of_another_kind_is_refused():
    assert TrainState.from_json(TrainState(step=3, best_eval=1.5).to_json()).best_eval == 1.5
    with pytest.raises(CheckpointError, match="does not hold the state of a run"):
        TrainState.from_json({"step": 3, "what": 1})
