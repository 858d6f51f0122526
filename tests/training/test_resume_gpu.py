"""On a GPU with every kernel: stopped, saved, loaded in a new run and trained on, against one that ran through, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rft.checkpoint.load import find_latest
from rft.parallel.mesh import World
from rft.training.state import resume_state, save_state
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_resumed_on_a_gpu_equals_uninterrupted_bit_for_bit(tmp_path: Path, adapter: str, recompute: str):
    model_dir = tmp_path / "model"
    tiny_llama(model_dir, vocab_size=400, hidden=256, heads=4, kv_heads=2)
    write_tiny_tokenizer(model_dir)
    packs = [batch.to("cuda") for batch in random_packs(8, seq_len=256, documents=5)]
    world = World(rank=0, world_size=1, local_rank=0, device=torch.device("cuda", 0), group=None)

    def build(name: str):
        return model_run(
            model_dir, tmp_path / name, packs, world=world, adapter={"name": adapter}, memory={"recompute": recompute},
            train={"precision": "bf16", "deterministic": True}, optim={"lr": 1e-2},
        )  # fmt: skip

    try:
        through = build("through")
        losses = [train_step(through, [batch]).terms["next_token"].item() for batch in packs]
        stopped = build("stopped")
        first = [train_step(stopped, [batch]).terms["next_token"].item() for batch in packs[:3]]
        stopped.state.step = stopped.state.step_in_epoch = 3
        save_state(stopped, "test")
        checkpoint = find_latest(stopped.run_dir)
        assert checkpoint is not None
        resumed = build("stopped")
        resume_state(resumed, checkpoint)
        rest = [train_step(resumed, [batch]).terms["next_token"].item() for batch in packs[3:]]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [*first, *rest] == losses
    ends = through.optimizer.named_masters()
    for name, tensor in resumed.optimizer.named_masters().items():
        assert torch.equal(tensor, ends[name]), name
