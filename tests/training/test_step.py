"""The loss is one sum over everything in a step, divided once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rft.data.batch import Batch
from rft.training.step import train_step
from support.stub_run import TinyModel, join, pack, stub_run

FORCED = {4: 4.0, 1: 1.0}
"""Loss that the stub model gives a target of this id."""


class ForcedLosses(nn.Module):
    """Loss of a labelled token = its target's entry in FORCED, plus a parameter, so that there is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def backbone(self, batch: Batch) -> tuple[Tensor, None]:
        return batch.labels[0].float()[:, None] * (1 + self.shift), None

    def loss_sums(
        self, hidden_TD: Tensor, labels: Tensor, weights: Tensor | None = None, **_: int
    ) -> dict[str, Tensor]:
        return {"next_token": hidden_TD[labels != -100].sum()}


def one_and_three() -> list[Batch]:
    """A micro-batch with one supervised token of loss 4, and one with three of loss 1."""
    first = pack([0, 4, 0, 0], labelled=[False, True, False, False])
    return [first, pack([0, 1, 1, 1])]


def loss_and_gradient(tmp_path: Path, micro_batches: list[Batch], **kw) -> tuple[float, Tensor]:
    run = stub_run(tmp_path, micro_batches, model=ForcedLosses(), **kw)
    kept: list[Tensor] = []
    parameter = run.trainee.model.shift
    parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))
    result = train_step(run, micro_batches)
    return result.terms["next_token"].item(), kept[-1]


def test_accumulation_reports_1_75_and_not_the_mean_of_means(tmp_path: Path):  # BO-20
    accumulated = loss_and_gradient(tmp_path, one_and_three())
    at_once = loss_and_gradient(tmp_path, [join(one_and_three())])
    assert accumulated[0] == pytest.approx(1.75)
    assert at_once[0] == pytest.approx(1.75)
    torch.testing.assert_close(accumulated[1], at_once[1], rtol=1e-5, atol=0)


def test_a_short_last_step_is_divided_by_its_own_count(tmp_path: Path):  # BO-20
    run = stub_run(tmp_path, [*one_and_three(), one_and_three()[0]], model=ForcedLosses(), packs_per_step=2)
    losses = [train_step(run, step).terms["next_token"].item() for step in run.loader.steps(0, 2)]
    run.optimizer.zero_grad()
    assert losses[0] == pytest.approx(1.75)
    assert losses[1] == pytest.approx(4.0 * (1 + run_shift_before_second_step(tmp_path)), rel=1e-5)


def run_shift_before_second_step(tmp_path: Path) -> float:
    run = stub_run(tmp_path, one_and_three(), model=ForcedLosses())
    train_step(run, one_and_three())
    return run.trainee.model.shift.item()


def eight_packs() -> list[Batch]:
    torch.manual_seed(3)
    packs = []
    for number in range(8):
        ids = torch.randint(1, 17, (6 + number,)).tolist()
        labelled = [token % 3 != 0 for token in ids]
        packs.append(pack(ids, labelled=labelled, size=14))
    return packs


def test_1_x_8_accumulation_equals_8_x_1(tmp_path: Path):
    def after_a_step(micro_batches: list[Batch]) -> tuple[float, float, dict[str, Tensor]]:
        run = stub_run(tmp_path, micro_batches, model=TinyModel())
        result = train_step(run, micro_batches)
        return result.terms["next_token"].item(), result.grad_norm.item(), run.optimizer.named_masters()

    one_by_one, together = after_a_step(eight_packs()), after_a_step([join(eight_packs())])
    assert one_by_one[0] == pytest.approx(together[0], rel=1e-6)
    assert one_by_one[1] == pytest.approx(together[1], rel=1e-5)
    for name, tensor in one_by_one[2].items():
        torch.testing.assert_close(tensor, together[2][name], rtol=1e-5, atol=1e-6, msg=name)


def test_weighted_labels_count_by_their_weight(tmp_path: Path):
    batch = pack([1, 2, 3, 4], weights=[0.0, 0.0, 1.0, 0.0])
    alone = pack([1, 2, 3, 4], labelled=[False, False, False, True])
    weighted, plain = (train_step(stub_run(tmp_path, [b]), [b]).terms["next_token"].item() for b in (batch, alone))
    assert weighted == pytest.approx(plain, rel=1e-6)


def test_a_filler_pack_changes_neither_loss_nor_gradient_nor_counts(tmp_path: Path):
    filler = pack([], size=14)
    with_it, without = (
        (run := stub_run(tmp_path, packs), train_step(run, packs))
        for packs in ([*eight_packs(), filler], eight_packs())
    )
    assert with_it[1].terms["next_token"].item() == without[1].terms["next_token"].item()
    assert with_it[1].counts == without[1].counts
    for a, b in zip(with_it[0].optimizer.parameters, without[0].optimizer.parameters, strict=True):
        assert torch.equal(a, b)


def test_the_step_uses_the_rate_of_its_number_and_the_next_one_is_ready(tmp_path: Path):
    packs = eight_packs()
    run = stub_run(tmp_path, packs, optim={"lr": 1.0, "schedule": {"name": "linear", "warmup_steps": 0}})
    assert [train_step(run, [batch]).lr for batch in packs[:3]] == pytest.approx([1.0, 7 / 8, 6 / 8])
