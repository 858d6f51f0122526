"""Optimizers by their config table, learning-rate schedules, clipping."""

from __future__ import annotations

from rft.config.optim import AdamWConfig
from rft.optim.adamw import Optimizer, build_adamw
from rft.optim.clip import clip_grad_norm
from rft.optim.schedule import Schedule

BUILDERS = {AdamWConfig: build_adamw}

__all__ = ["BUILDERS", "Optimizer", "Schedule", "clip_grad_norm"]
