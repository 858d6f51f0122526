"""What an evaluation takes over of a run's config."""

from __future__ import annotations

from pathlib import Path

from rft.checkpoint.target import Target
from rft.config.model import ModelConfig
from rft.training.held_out import eval_config


def test_nothing_is_offloaded_where_nothing_is_kept(tmp_path: Path):
    run = {
        "data": {"train": [{"path": "rows.jsonl"}]},
        "optim": {"in_backward": True},
        "memory": {
            "offload": "disk",
            "offload_host": 4.0,
            "offload_states": "cpu",
            "tiled_mlp": 4,
            "recompute": "full",
        },
        "train": {"on_oom": "replan", "accumulate": 1, "max_grad_norm": "none"},
    }
    target = Target("run", tmp_path, ModelConfig(path="org/model"), None, run)
    config = eval_config(target, [str(tmp_path / "rows.jsonl")], bf16=False)
    assert config.memory.model_dump(exclude_unset=True) == {"tiled_mlp": 4}
    assert config.train.on_oom == "fail"
    assert not config.optim.in_backward
