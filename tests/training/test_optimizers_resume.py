"""A run of every optimizer is saved as files and goes on from them bit for bit, wherever its states lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.checkpoint.load import find_latest
from rft.training.state import resume_state, save_state
from support.ranked import gathered, make_run, moments, steps, write_base

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "adamw, bf16 weights and states": {"optim": {"name": "adamw", "states": "bfloat16"},
                                       "train": {"precision": "bf16", "master": "bfloat16"}},
    "adamw_8bit in backward": {"optim": {"name": "adamw_8bit", "in_backward": True}, "train": {"max_grad_norm": "none"}},
    "adafactor": {"optim": {"name": "adafactor"}},
    "lion on disk": {"optim": {"name": "lion"}, "memory": {"offload_states": "disk"}},
    "weights and masters on the host": {"optim": {"name": "adamw", "in_backward": True},
                                        "memory": {"offload_states": "cpu", "offload_weights": "cpu"},
                                        "train": {"precision": "bf16", "max_grad_norm": "none"}},
    "bf16 weights on the host": {"optim": {"name": "lion", "in_backward": True}, "memory": {"offload_weights": "cpu"},
                                 "train": {"precision": "bf16", "master": "bfloat16", "max_grad_norm": "none"}},
    "muon, masters on the host": {"optim": {"name": "muon"}, "memory": {"offload_states": "cpu"}, "train": {"precision": "bf16"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("optimizers") / "base")


@pytest.mark.parametrize("name", CASES)
def test_a_saved_run_goes_on_bit_for_bit(base, tmp_path: Path, name):
    tables = {table: dict(values) for table, values in CASES[name].items()}
    tables["optim"]["lr"] = 1e-3
    options: dict[str, Any] = {"lora": False, "packs_per_step": 1, **tables}
    straight = make_run(base, tmp_path / "run", **options)
    steps(straight, 2)
    save_state(straight, "test")
    made = steps(straight, 2)
    resumed = make_run(base, tmp_path / "run", **options)
    checkpoint = find_latest(tmp_path / "run")
    assert checkpoint is not None
    resume_state(resumed, checkpoint)
    assert steps(resumed, 2) == made
    for got, wanted in ((gathered(resumed), gathered(straight)), (moments(resumed), moments(straight))):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(got[key], value), key
    assert {float(v) for k, v in moments(resumed).items() if k.endswith("::step")} == {4.0}
