"""A few real steps of a config, to hold beside what was planned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rft.config.root import Config
from rft.errors import ConfigError
from rft.parallel.mesh import join_world, leave_world
from rft.training.loop import advance, steps_left
from rft.training.setup import add_data, build_run, inspect_job
from rft.training.step import train_step

WARM_UP, STEPS = 2, 3


class _Silent:
    def step_begins(self, data_seconds: float) -> None:
        """Nobody measures the loader here."""


def measure_steps(config: Config, folder: Path) -> dict[str, Any]:
    """Run up to five steps in this process, the last three measured. Writes into `folder` alone; the prepared data is kept.

    Returns steps, seconds of one, real tokens/s, and the peak of torch's allocator (0 on a CPU).
    """
    world = join_world()
    if world.world_size > 1:
        raise ConfigError("--probe", "runs in one process", do="start `rft plan` itself, not under torchrun")
    cuda = world.device.type == "cuda"
    try:
        job = inspect_job(config, world)
        add_data(job, None)
        run = build_run(job, folder, None)
        seconds, tokens = [], []
        for micro_batches in steps_left(run, _Silent()):  # type: ignore[arg-type]
            if cuda:
                torch.cuda.synchronize()
                if run.state.step == WARM_UP:
                    torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            result = train_step(run, micro_batches)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            tokens.append(int(result.counts["tokens"]))
            advance(run, result.counts)
            if len(seconds) == WARM_UP + STEPS:
                break
        run.loader.close()
        kept = min(len(seconds), STEPS)
        return {
            "steps": kept,
            "seconds": sum(seconds[-kept:]) / kept,
            "tokens_per_second": sum(tokens[-kept:]) / sum(seconds[-kept:]),
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        }
    finally:
        leave_world()
