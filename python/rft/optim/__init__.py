"""Optimizers by their config table, learning-rate schedules, clipping."""

from __future__ import annotations

from rft.config.optim import AdafactorConfig, AdamW8bitConfig, AdamWConfig, LionConfig, MuonConfig
from rft.optim.build import build
from rft.optim.clip import clip_factor, grad_norm
from rft.optim.home import Home
from rft.optim.optimizer import Optimizer
from rft.optim.schedule import Schedule

BUILDERS = {
    AdamWConfig: build,
    AdamW8bitConfig: build,
    AdafactorConfig: build,
    LionConfig: build,
    MuonConfig: build,
}

__all__ = ["BUILDERS", "Home", "Optimizer", "Schedule", "clip_factor", "grad_norm"]
