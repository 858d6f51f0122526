"""The loop as a whole, around a model of a few numbers: steps, evaluations, checkpoints, early stop, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.checkpoint.load import find_latest
from rft.data.batch import Batch
from rft.errors import Stopped, TrainingError
from rft.training import finish as finish_module
from rft.training import loop
from rft.training.evaluate import Evaluation, evaluate
from rft.training.run import Run
from rft.training.signals import Signals
from rft.training.state import resume_state
from support.stub_run import TinyModel, pack, stub_run


def packs(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [pack(torch.randint(1, 17, (5 + i % 4,), generator=generator).tolist(), size=8) for i in range(count)]


@pytest.fixture(autouse=True)
def no_export(monkeypatch):
    """The stub model is none of transformers': what `final/` would hold is noted instead of written."""

    def note(folder: Path, *, masters: dict[str, torch.Tensor], **_: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({}, folder / "unused")
        exported.clear()
        exported.update({name: tensor.clone() for name, tensor in masters.items()})

    exported: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(finish_module, "save_final", note)
    return exported


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    text = (run.run_dir / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in lines(run, "train")]


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").iterdir())


def forced_evaluations(monkeypatch, by_step: dict[int, float]) -> None:
    def forced(run: Run, progress=None) -> Evaluation:
        return Evaluation(by_step.get(run.state.step, 9.0), 10, 20, 0.01)

    monkeypatch.setattr(loop, "evaluate", forced)


def test_102_packs_by_4_are_26_steps_planned_and_run(tmp_path: Path):  # BO-24
    schedule = {"name": "cosine", "warmup_ratio": 0.1}
    run = stub_run(tmp_path, packs(102), packs_per_step=4, optim={"schedule": schedule})
    assert (run.total_steps, run.schedule.warmup) == (26, 3)
    result = loop.train(run)
    rates = [line["lr"] for line in lines(run, "train")]
    assert (result.steps, len(rates)) == (26, 26)
    assert rates[:4] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert rates[-1] == pytest.approx(run.schedule.peaks[0] * run.schedule.lr_ratio(25))
    assert run.schedule.lr == pytest.approx(0.0, abs=1e-12), "the curve ends where the run does"


def test_every_label_of_every_epoch_is_trained_on_once(tmp_path: Path):
    data = packs(7)
    run = stub_run(tmp_path, data, packs_per_step=2, total_steps=8, log={"every_steps": 3})
    result = loop.train(run)
    assert result.label_tokens == 2 * sum(batch.num_label_tokens for batch in data)
    assert sum(line["label_tokens"] for line in lines(run, "train")) == result.label_tokens
    assert [line["step"] for line in lines(run, "train")] == [3, 6, 8]
    assert result.epochs == pytest.approx(2.0)


def test_a_line_over_several_steps_gives_the_loss_per_label_of_them_all(tmp_path: Path):
    data = packs(6)
    single = stub_run(tmp_path / "a", data, optim={"lr": 1e-30})
    together = stub_run(tmp_path / "b", data, optim={"lr": 1e-30}, log={"every_steps": 6})
    loop.train(single)
    loop.train(together)
    labels = [batch.num_label_tokens for batch in data]
    mean = sum(loss * n for loss, n in zip(losses(single), labels, strict=True)) / sum(labels)
    assert losses(together) == pytest.approx([mean], rel=1e-6)


def test_summary_and_metrics_tell_the_same_numbers(tmp_path: Path):
    run = stub_run(tmp_path, packs(6), eval_packs=packs(3, seed=9), train={"eval_every_steps": 2})
    result = loop.train(run)
    train, evals = lines(run, "train"), lines(run, "eval")
    assert result.tokens == sum(line["tokens"] for line in train)
    assert result.seconds == pytest.approx(sum(line["seconds"]["step"] for line in train))
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)
    assert result.train_loss == train[-1]["loss"]
    assert (result.eval_loss_before, result.eval_loss) == (evals[0]["loss"], evals[-1]["loss"])
    assert json.loads((run.run_dir / "summary.json").read_text())["eval_loss"] == result.eval_loss


def test_held_out_loss_comes_at_step_0_when_planned_and_at_the_end_once_each(tmp_path: Path):
    run = stub_run(tmp_path, packs(6), eval_packs=packs(3, seed=9), train={"eval_every_steps": 4})
    loop.train(run)
    assert [line["step"] for line in lines(run, "eval")] == [0, 4, 6]


def test_held_out_loss_is_total_loss_over_total_labels(tmp_path: Path):  # BO-40
    held_out = [pack([1, 2], size=8), pack([3, 4, 5, 6, 7, 8], size=8)]  # 1 and 5 labels: a mean of means would differ
    run = stub_run(tmp_path, packs(2), eval_packs=held_out)
    with torch.no_grad():
        sums = [run.trainee(batch)["next_token"].item() for batch in held_out]
    result = evaluate(run)
    assert result.loss == pytest.approx(sum(sums) / 6, rel=1e-6)
    assert abs(result.loss - (sums[0] / 1 + sums[1] / 5) / 2) > 1e-3
    assert result.label_tokens == 6


def test_evaluation_changes_nothing_of_the_training(tmp_path: Path):
    plain = stub_run(tmp_path / "a", packs(6))
    evaluated = stub_run(tmp_path / "b", packs(6), eval_packs=packs(3, seed=9), train={"eval_every_steps": 1})
    loop.train(plain)
    loop.train(evaluated)
    assert losses(plain) == losses(evaluated)


def test_best_and_last_checkpoint_stay_and_final_is_the_best(tmp_path: Path, monkeypatch, no_export):  # BO-32
    forced_evaluations(monkeypatch, {2: 5.0, 4: 4.0, 6: 3.0})
    run = stub_run(
        tmp_path,
        packs(12),
        eval_packs=packs(1),
        train={"eval_every_steps": 2},
        checkpoint={"save_every_steps": 3, "keep_last": 1, "keep_best": 1, "final": "best"},
    )
    result = loop.train(run)
    assert checkpoints(run) == ["step-12", "step-6"]
    assert (result.final_step, result.eval_loss) == (6, 3.0)
    other = stub_run(tmp_path / "six", packs(12), total_steps=6)
    loop.train(other)
    for name, tensor in other.optimizer.named_masters().items():
        assert torch.equal(no_export[name], tensor), name


def test_a_new_best_between_planned_saves_is_saved_at_its_step(tmp_path: Path, monkeypatch):  # BO-32
    forced_evaluations(monkeypatch, {2: 5.0, 4: 3.0})
    run = stub_run(
        tmp_path,
        packs(12),
        eval_packs=packs(1),
        train={"eval_every_steps": 2},
        checkpoint={"save_every_steps": 3, "keep_last": 1, "final": "best"},
    )
    assert loop.train(run).final_step == 4
    assert checkpoints(run) == ["step-12", "step-4"]


def test_early_stop_ends_after_its_patience_and_a_resume_does_not_go_on(tmp_path: Path, monkeypatch):
    forced_evaluations(monkeypatch, {2: 5.0, 4: 4.0})
    tables = {
        "train": {"eval_every_steps": 2, "early_stop": {"patience": 2}},
        "checkpoint": {"final": "best"},
    }
    run = stub_run(tmp_path, packs(20), eval_packs=packs(1), **tables)
    result = loop.train(run)
    assert (result.status, result.steps, result.final_step) == ("stopped early", 8, 4)
    again = stub_run(tmp_path, packs(20), eval_packs=packs(1), **tables)
    resume(again)
    assert loop.train(again).steps == 8


def test_min_delta_is_how_much_lower_a_loss_must_be(tmp_path: Path, monkeypatch):
    forced_evaluations(monkeypatch, {n: 5.0 - 0.01 * n for n in range(20)})
    run = stub_run(
        tmp_path, packs(20), eval_packs=packs(1),
        train={"eval_every_steps": 1, "early_stop": {"patience": 3, "min_delta": 0.1}}, checkpoint={"final": "best"},
    )  # fmt: skip
    result = loop.train(run)
    assert (result.steps, result.final_step) == (4, 4), "never better by 0.1, yet the lowest one is the last"


def resume(run: Run) -> None:
    checkpoint = find_latest(run.run_dir)
    assert checkpoint is not None
    resume_state(run, checkpoint)
    run.saved_step = checkpoint.step


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, stop_after: int, monkeypatch):  # BO-25
    tables: dict[str, Any] = {
        "optim": {"lr": 1e-2, "schedule": {"name": "linear", "warmup_steps": 2}},
        "train": {"eval_every_steps": 2},
    }
    straight = stub_run(tmp_path / "a", packs(5), total_steps=8, eval_packs=packs(2, seed=5), **tables)
    loop.train(straight)

    first = stub_run(tmp_path / "b", packs(5), total_steps=8, eval_packs=packs(2, seed=5), **tables)
    first.signals = Signals()
    real_step = loop.step_within_memory

    def step_then_signal(run: Run, micro_batches: list[Batch]):
        result = real_step(run, micro_batches)
        if run.state.step + 1 == stop_after and run is first:
            first.signals.request()
        return result

    monkeypatch.setattr(loop, "step_within_memory", step_then_signal)
    with pytest.raises(Stopped) as stopped:
        loop.train(first)
    assert stopped.value.exit_code == 143
    assert first.state.step == stop_after

    second = stub_run(tmp_path / "b", packs(5), total_steps=8, eval_packs=packs(2, seed=5), **tables)
    resume(second)
    loop.train(second)
    for key in ("loss", "lr", "grad_norm", "tokens"):
        assert [x[key] for x in lines(straight, "train")] == [x[key] for x in lines(second, "train")], key
    assert [x["loss"] for x in lines(straight, "eval")] == [x["loss"] for x in lines(second, "eval")]
    for name, tensor in straight.optimizer.named_masters().items():
        assert torch.equal(tensor, second.optimizer.named_masters()[name]), name


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path: Path):
    class Growing(TinyModel):
        calls = 0

        def backbone(self, batch):
            hidden, none = super().backbone(batch)
            self.calls += 1
            return hidden * 1e16 ** (self.calls - 1), none  # beyond fp32 in the third step or the fourth

    run = stub_run(
        tmp_path, packs(6), model=Growing(), optim={"lr": 1e4}, checkpoint={"save_every_steps": 1}, log={"every_steps": 100}
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"step \d: the (loss|next token|gradient norm) is (nan|inf)"):
        loop.train(run)
    kept = find_latest(run.run_dir)
    assert kept is None or all(torch.isfinite(t).all() for t in run_masters(run, kept))


def run_masters(run: Run, checkpoint) -> list[torch.Tensor]:
    resume_state(run, checkpoint)
    return list(run.optimizer.named_masters().values())


def test_gradients_that_are_all_zero_stop_the_run(tmp_path: Path):  # BO-34
    class Cut(TinyModel):
        def backbone(self, batch):
            hidden, none = super().backbone(batch)
            return hidden * 0.0, none

    with pytest.raises(TrainingError, match="every gradient is exactly zero"):
        loop.train(stub_run(tmp_path, packs(3), model=Cut()))


def test_a_step_without_any_label_is_no_error_and_logs_no_loss(tmp_path: Path):  # BO-21
    unlabelled = pack([1, 2, 3], labelled=[False] * 3, size=8)
    run = stub_run(tmp_path, [*packs(2), unlabelled, *packs(1)])
    loop.train(run)
    assert [line["loss"] is None for line in lines(run, "train")] == [False, False, True, False]


def test_a_signal_in_a_long_step_gives_it_up_and_the_resumed_run_makes_it_again_bit_for_bit(tmp_path: Path):
    class Dropping(TinyModel):
        """Draws from the generator in each forward; asks for a stop in the middle of the third step."""

        forwards, run = 0, None

        def backbone(self, batch):
            hidden, none = super().backbone(batch)
            self.forwards += 1
            if self.run is not None and self.forwards == 5:
                self.run.signals.request()
            return torch.nn.functional.dropout(hidden, 0.5), none

    def build(name: str) -> Run:
        run = stub_run(tmp_path / name, packs(8), packs_per_step=2, model=Dropping())
        run.signals = Signals()
        torch.manual_seed(1)
        return run

    straight = build("a")
    loop.train(straight)
    first = build("b")
    first.signals.long_steps, first.model.run = True, first
    with pytest.raises(Stopped):
        loop.train(first)
    assert (first.state.step, checkpoints(first)) == (2, ["step-2"])
    second = build("b")
    resume(second)
    loop.train(second)
    assert losses(straight) == losses(second)


def test_signal_before_the_first_step_saves_what_there_is(tmp_path: Path):
    run = stub_run(tmp_path, packs(3), eval_packs=packs(2))
    run.signals = Signals()
    run.signals.request()
    with pytest.raises(Stopped) as stopped:
        loop.train(run)
    assert stopped.value.exit_code == 143
