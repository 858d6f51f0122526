"""A run directory written by hand: what `rft train` leaves behind, without a training."""

from __future__ import annotations

import json
import math
from pathlib import Path

CONFIG = """\
[model]
path = "SmolLM2-135M-Instruct"

[adapter]
name = "lora"
r = 16

[data]
seq_len = 1024
packing = "stream"

[[data.train]]
path = "rows.jsonl"
"""

RECEIPTS = {
    "asked": ["attention auto", "precision auto"],
    "applied": [
        {"what": "attention sdpa", "count": 30, "of": 30, "how": "a call a document", "checked": {"packed": 3.1e-6}},
        {
            "what": "RMSNorm",
            "count": 61,
            "of": 61,
            "how": "F.rms_norm",
            "checked": {"fp32 forward": 2.4e-7, "bf16 forward": 0.0039, "bf16, fp32 weight forward": 1e-4},
        },
    ],
    "declined": [{"what": "varlen attention", "count": 30, "why": "needs CUDA"}],
}

DATA = {
    "train": {
        "read": 6214,
        "kept": 6190,
        "dropped": {"empty": 20, "bad row": 4},
        "tokens": 1_310_000,
        "trained_tokens": 930_100,
        "plan": {"packs": 1285, "seq_len": 1024, "fill": 0.9957},
        "sources": [{"path": "rows.jsonl", "evidence": "messages: 100 of the first 100 rows have a list `messages`"}],
    }
}


def write_run_directory(path: Path, *, steps: int = 60, finished: bool = True) -> Path:
    """A run of `steps` steps with a smoothly falling loss and an evaluation every ten."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.resolved.toml").write_text(CONFIG)
    (path / "receipts.json").write_text(json.dumps(RECEIPTS))
    (path / "data.json").write_text(json.dumps(DATA))
    lines = []
    for step in range(steps + 1):
        if step % 10 == 0:
            lines.append({"kind": "eval", "step": step, "epoch": step / 120, "loss": 1.9 + 0.5 * math.exp(-step / 15)})
        if step:
            lines.append(train_line(step, steps))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (path / "final").mkdir(exist_ok=True)
    return path


def train_line(step: int, steps: int) -> dict:
    wobble = math.sin(12.9898 * step) * 0.08
    return {
        "kind": "train",
        "step": step,
        "epoch": step / 120,
        "loss": 1.92 + 0.55 * math.exp(-step / 15) + wobble,
        "grad_norm": 0.4 + 0.6 * math.exp(-step / 8) + abs(wobble),
        "lr": 2e-4 * min(1, step / 3) * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "tokens": 2048,
        "label_tokens": 1450 + step,
        "tokens_per_second": 388 + 40 * wobble,
        "mfu": 0.31 + wobble / 20,
        "memory_peak_bytes": int((1.9 + 0.1 * min(1, step / 5)) * 2**30),
        "seconds": {"data": 0.01, "forward": 1.7 + wobble, "backward": 3.4, "optimizer": 0.1},
    }
