"""The same losses as transformers and PEFT in a plain loop, step by step, packed and unpacked, LoRA and full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft.data.batch import Batch
from rft.training.run import Run
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs, split_documents
from support.reference import Reference, train_reference
from support.stub_run import join
from support.tiny import tiny_llama

STEPS, PER_STEP = 20, 2
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, tied=True)
    return write_tiny_tokenizer(folder)


def steps_of(packs: list[Batch]) -> list[list[Batch]]:
    return [packs[i : i + PER_STEP] for i in range(0, len(packs), PER_STEP)]


def initial_adapter(run: Run) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor.clone() for name, tensor in run.optimizer.named_masters().items()}


def train_and_note(run: Run, steps: list[list[Batch]]) -> tuple[list[float], list[float]]:
    results = [train_step(run, micro_batches) for micro_batches in steps]
    return [r.terms["next_token"].item() for r in results], [r.grad_norm.item() for r in results]


def rates(run: Run) -> list[float]:
    peak = run.schedule.peaks[0]
    return [peak * run.schedule.lr_ratio(step) for step in range(run.total_steps)]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_twenty_steps_equal_transformers_and_peft(model_dir: Path, tmp_path: Path, adapter: str, packed: bool):
    packs = random_packs(STEPS * PER_STEP)
    run = model_run(
        model_dir,
        tmp_path,
        packs,
        packs_per_step=PER_STEP,
        adapter={"name": adapter},
        optim={"lr": 2e-3, "weight_decay": 0.1, "schedule": {"name": "cosine", "warmup_steps": 3}},
    )
    reference: Reference = train_reference(
        model_dir,
        steps_of(packs),
        rates(run),
        lora=LORA if adapter == "lora" else None,
        initial=initial_adapter(run),
        weight_decay=0.1,
    )
    steps = steps_of(packs)
    if not packed:
        steps = [[part for batch in step for part in split_documents(batch)] for step in steps]
    losses, norms = train_and_note(run, steps)
    assert losses == pytest.approx(reference.losses, rel=1e-4)
    assert norms == pytest.approx(reference.grad_norms, rel=1e-3)
    assert max(losses) - min(losses) > 0.05, "something was learned, or equal losses would prove nothing"
    trained = dict(reference.model.named_parameters())
    for name, tensor in run.optimizer.named_masters().items():
        torch.testing.assert_close(tensor, trained[name.removeprefix("model.")], rtol=1e-3, atol=2e-4, msg=name)


def test_packed_and_unpacked_rows_give_one_total_loss_and_gradient(model_dir: Path, tmp_path: Path):
    packs = random_packs(4)
    apart = [part for batch in packs for part in split_documents(batch)]
    results = []
    for micro_batches in (packs, apart):
        run = model_run(model_dir, tmp_path, micro_batches, adapter={"name": "none"})
        result = train_step(run, micro_batches)
        results.append((result.terms["next_token"].item(), result.grad_norm.item(), run.optimizer.named_masters()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_one_step_of_eight_micro_batches_equals_one_of_eight_packs(model_dir: Path, tmp_path: Path):
    packs = random_packs(8)
    results = []
    for micro_batches in (packs, [join(packs)]):
        run = model_run(model_dir, tmp_path, micro_batches)
        result = train_step(run, micro_batches)
        results.append((result.terms["next_token"].item(), result.grad_norm.item()))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_bf16_with_fp32_masters_follows_fp32(model_dir: Path, tmp_path: Path, adapter: str):
    packs = random_packs(STEPS * PER_STEP)
    runs = {}
    for precision in ("fp32", "bf16"):
        run = model_run(
            model_dir, tmp_path, packs, packs_per_step=PER_STEP, adapter={"name": adapter}, train={"precision": precision},
            optim={"lr": 2e-3},
        )  # fmt: skip
        losses, _ = train_and_note(run, steps_of(packs))
        runs[precision] = (losses, run)
    assert runs["bf16"][0] == pytest.approx(runs["fp32"][0], rel=2e-3)
    run = runs["bf16"][1]
    masters = run.optimizer.named_masters()
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    for name, parameter in run.trainee.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        if parameter.requires_grad:
            assert torch.equal(parameter, masters[name].bfloat16()), name


def test_bf16_masters_by_choice(model_dir: Path, tmp_path: Path):
    packs = random_packs(2)
    run = model_run(model_dir, tmp_path, packs, train={"precision": "bf16", "master": "bfloat16"})
    train_and_note(run, steps_of(packs))
    assert {tensor.dtype for tensor in run.optimizer.named_masters().values()} == {torch.bfloat16}
