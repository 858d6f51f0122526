"""On a GPU: a step never waits for the device, deterministic repeats are bit-equal, and bf16 masters hold on this torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.closeness import relative_error
from rft.data.batch import Batch
from rft.parallel.mesh import World
from rft.training import loop
from rft.training.evaluate import evaluate
from rft.training.run import Run
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs
from support.stub_run import StubLoader
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, hidden=256, heads=4, kv_heads=2)
    return write_tiny_tokenizer(folder)


def gpu() -> World:
    return World(rank=0, world_size=1, local_rank=0, device=torch.device("cuda", 0), group=None)


def on_gpu(packs: list[Batch]) -> list[Batch]:
    return [batch.to("cuda") for batch in packs]


def build(model_dir: Path, tmp_path: Path, packs: list[Batch], **tables: dict[str, Any]) -> Run:
    train = {"precision": "bf16", "deterministic": True, **tables.pop("train", {})}
    return model_run(model_dir, tmp_path, packs, world=gpu(), train=train, **tables)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_step_never_waits_for_the_device(model_dir: Path, tmp_path: Path, adapter: str):
    packs = on_gpu(random_packs(6, seq_len=192))
    run = build(model_dir, tmp_path, packs, adapter={"name": adapter})
    for batch in packs[:3]:  # the first steps allocate and compile
        train_step(run, [batch])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in packs[3:]:
            result = train_step(run, [batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(result.terms["next_token"])


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_deterministic_repeats_are_bit_equal(model_dir: Path, tmp_path: Path, adapter: str):
    packs = on_gpu(random_packs(8, seq_len=512, documents=8))
    ends = []
    for number in range(2):
        run = build(model_dir, tmp_path / str(number), packs, adapter={"name": adapter}, optim={"lr": 1e-2})
        for batch in packs:
            train_step(run, [batch])
        ends.append(run.optimizer.named_masters())
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_bf16_on_the_gpu_follows_fp32_on_the_cpu(model_dir: Path, tmp_path: Path, adapter: str):
    packs = random_packs(12, seq_len=192)
    cpu = model_run(model_dir, tmp_path / "cpu", packs, adapter={"name": adapter}, optim={"lr": 2e-3})
    run = build(model_dir, tmp_path / "gpu", on_gpu(packs), adapter={"name": adapter}, optim={"lr": 2e-3})
    for one, other in zip(packs, on_gpu(packs), strict=True):
        slow, fast = train_step(cpu, [one]), train_step(run, [other])
        assert fast.terms["next_token"].item() == pytest.approx(slow.terms["next_token"].item(), rel=5e-3)
    assert {tensor.dtype for tensor in run.optimizer.named_masters().values()} == {torch.float32}


def test_lines_come_one_step_late_and_all_of_them_come(model_dir: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("rft.training.finish.save_final", lambda *_, **__: None)
    packs = on_gpu(random_packs(5, seq_len=192))
    run = build(model_dir, tmp_path, packs)
    run = dataclasses.replace(run, device_name=torch.cuda.get_device_name())
    result = loop.train(run)
    assert result.steps == 5
    assert len((run.run_dir / "metrics.jsonl").read_text().splitlines()) == 5
    assert result.memory_peak_bytes > 0


def test_evaluation_of_512_packs_takes_no_more_memory_than_of_64_and_no_more_than_training(
    model_dir: Path, tmp_path: Path
):  # BO-40
    def packs(count: int) -> list[Batch]:
        return on_gpu(random_packs(count, seq_len=192))

    run = build(model_dir, tmp_path, packs(2), eval_packs=packs(64), adapter={"name": "none"})
    peaks = {}
    for count in (64, 512):
        run.eval_loader = StubLoader(packs(count))  # type: ignore[assignment]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        evaluate(run)
        peaks[count] = torch.cuda.max_memory_allocated() - before
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train_step(run, run.loader.packs[:1])  # type: ignore[attr-defined]
    assert peaks[512] <= peaks[64] * 1.05
    assert peaks[512] <= torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_of_the_micro_batch_trains_as_launches_do(
    model_dir: Path, tmp_path: Path, adapter: str, accumulate: int
):
    packs = on_gpu([p for n in (3, 8, 5, 4) for p in random_packs(6, seq_len=512, documents=n, seed=n)])
    ends, losses = [], []
    for graph in (False, True):
        train = {"cuda_graph": graph, "accumulate": accumulate}
        run = build(model_dir, tmp_path / str(graph), packs, adapter={"name": adapter}, train=train)
        steps = [packs[i : i + accumulate] for i in range(0, len(packs), accumulate)]
        losses.append([float(sum(train_step(run, step).terms.values())) for step in steps])
        ends.append({name: master.clone() for name, master in run.optimizer.named_masters().items()})
        if graph:
            assert run.graphs is not None
            assert not run.graphs.off, run.receipts["declined"]
            assert run.graphs.replays >= 6  # the others are a shape's first and second batch
            (receipt,) = (a for a in run.receipts["applied"] if a["what"] == "cuda graph")
            checked = receipt["checked"]
            assert max(checked["batch loss"], checked["other batch loss"]) < 1e-2
            assert max(checked["batch gradient"], checked["other batch gradient"]) < 1e-2 + 3 * checked["rounding"]
    torch.use_deterministic_algorithms(False)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, end in ends[0].items():
        assert relative_error(ends[1][name], end) < 1e-2, name


@pytest.mark.parametrize("attention", ["auto", "varlen", "sdpa"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_compiled_layers_train_as_the_layers_do(
    model_dir: Path, tmp_path: Path, adapter: str, recompute: str, attention: str
):
    """Every kernel inside; packs of one length and of different numbers of documents share their graphs."""
    packs = on_gpu([p for n in (3, 8, 5, 4) for p in random_packs(2, seq_len=512, documents=n, seed=n)])
    ends, losses = [], []
    for compile in (False, True):
        run = build(
            model_dir, tmp_path / str(compile), packs, adapter={"name": adapter}, memory={"recompute": recompute},
            train={"compile": compile, "accumulate": 2}, model={"path": str(model_dir), "attention": attention},
        )  # fmt: skip
        losses.append([float(sum(train_step(run, packs[i : i + 2]).terms.values())) for i in range(0, len(packs), 2)])
        ends.append({name: master.clone() for name, master in run.optimizer.named_masters().items()})
    torch.use_deterministic_algorithms(False)
    assert not [d for d in run.receipts["declined"] if d["what"] == "compiled layers"], run.receipts["declined"]
    (receipt,) = (a for a in run.receipts["applied"] if a["what"] == "compiled layers")
    assert receipt["count"] == receipt["of"]
    assert run.trainee.compiled.graphs == (2 if adapter == "lora" else 1), receipt
    assert max(receipt["checked"].values()) < 2e-2
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    for name, end in ends[0].items():
        assert relative_error(ends[1][name], end) < 1e-2, name
