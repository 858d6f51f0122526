"""A run with every kernel swapped in is the run without: losses, gradient norms, trained weights. In Triton's interpreter, fp32."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.training.step import train_step
from support.close import assert_close
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs
from support.tiny import tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, layers=1, tied=True)
    return write_tiny_tokenizer(folder)


CASES = [
    pytest.param("lora", {}, {}, id="lora"),
    pytest.param("none", {}, {}, id="full", marks=pytest.mark.slow),
    pytest.param(
        "lora", {"recompute": "full"}, {"chunk_rows": "least"}, id="lora, recompute, least", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("adapter", "memory", "loss"), CASES)
def test_two_steps_with_kernels_equal_two_without(model_dir: Path, tmp_path: Path, adapter, memory, loss):
    packs = random_packs(4, seq_len=24)
    ends = []
    for kernels in (False, True):
        run = model_run(
            model_dir, tmp_path / str(kernels), packs, packs_per_step=2, kernels=kernels, adapter={"name": adapter},
            optim={"lr": 2e-3}, memory=memory, loss=loss,
        )  # fmt: skip
        results = [train_step(run, packs[i : i + 2]) for i in (0, 2)]
        losses = [float(r.terms["next_token"]) for r in results]
        ends.append((losses, [float(r.grad_norm) for r in results], run.optimizer.named_masters(), run.receipts))
    (losses, norms, weights, _), (own_losses, own_norms, own_weights, receipts) = ends
    assert own_losses == pytest.approx(losses, rel=1e-5)
    assert own_norms == pytest.approx(norms, rel=1e-4)
    for name, weight in weights.items():
        assert_close(own_weights[name], weight, 2e-3, name)  # AdamW's first steps move by the sign of a gradient
    done = {a["what"]: (a["count"], a["of"]) for a in receipts["applied"]}
    assert done["rms_norm kernel"] == (3, 3)
    assert done["gated mlp"] == done["attention block"] == (1, 1)
    assert done["linear cross entropy kernel"] == (1, 1)
    assert done.get("lora linear") == ((7, 7) if adapter == "lora" else None)
    assert done.get("recompute") == ((1, 1) if memory else None)


def test_a_cpu_run_says_why_it_has_no_kernels(model_dir: Path, tmp_path: Path):
    run = model_run(model_dir, tmp_path, random_packs(1))
    (declined,) = [d for d in run.receipts["declined"] if d["what"] == "kernels"]
    assert declined["why"] == "they need CUDA, this is a cpu"
