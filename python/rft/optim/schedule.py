"""Learning rate over the run: a pure function of the step, so that resuming cannot shift it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rft.config.optim import (
    DEFAULT_WARMUP_RATIO,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    ScheduleConfig,
    WsdSchedule,
)
from rft.errors import ConfigError
from rft.words import counted


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Steps of linear warm-up: as given, or the given share of all steps rounded up.

    Raises ConfigError where both are given, or where the warm-up is longer than the run.
    """
    if config.warmup_steps is not None and config.warmup_ratio is not None:
        raise ConfigError(
            "optim.schedule",
            f"warmup_steps = {config.warmup_steps} and warmup_ratio = {config.warmup_ratio} are both given",
            wanted="one of them",
            do="leave out the one you do not mean",
        )
    if config.warmup_steps is not None:
        if config.warmup_steps > total_steps:
            raise ConfigError(
                "optim.schedule.warmup_steps",
                f"{counted(config.warmup_steps, 'step')} of warm-up, but the run has {total_steps}",
                wanted=f"at most {total_steps}",
                do="use warmup_ratio, or train for longer",
            )
        return config.warmup_steps
    ratio = DEFAULT_WARMUP_RATIO if config.warmup_ratio is None else config.warmup_ratio
    # 1e-9: 0.1 x 30 is 3.0000000000000004 in floating point and must not become 4 steps.
    return min(total_steps, math.ceil(ratio * total_steps - 1e-9))


@dataclass
class Schedule:
    """Rates of every optimizer step, counted from 0: step k runs at peak x `lr_ratio(k)`.

    Warm-up step k (of w) runs at (k + 1) / w of the peak, so that no step is wasted at rate 0. The decay starts at the full
    rate in the first step after warm-up; its end value (min_ratio) is what a step after the last would run at.
    """

    config: ScheduleConfig
    total_steps: int
    groups: list[dict[str, Any]]
    """Parameter groups of the optimizer. Their `lr` is written here; the peak is what they held at the start."""
    position: int = 0
    warmup: int = field(init=False)
    peaks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.warmup = warmup_steps(self.config, self.total_steps)
        self.peaks = [group["lr"] for group in self.groups]
        self.set_step(self.position)

    def lr_ratio(self, step: int) -> float:
        """Rate of a step (from 0) over the peak."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return _after_warmup(self.config, step - self.warmup, self.total_steps - self.warmup, self.total_steps)

    def set_step(self, step: int) -> None:
        """The next optimizer step is number `step`, from 0."""
        self.position = step
        ratio = self.lr_ratio(step)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * ratio

    def step(self) -> None:
        """An optimizer step was made."""
        self.set_step(self.position + 1)

    @property
    def lr(self) -> float:
        """Rate of the next step in the first group."""
        return self.groups[0]["lr"] if self.groups else 0.0

    def describe(self) -> dict[str, Any]:
        """What decides the curve: compared on resume and written to checkpoints."""
        return {
            **self.config.model_dump(),
            "warmup_steps": self.warmup,
            "total_steps": self.total_steps,
            "peaks": self.peaks,
        }


def _after_warmup(config: ScheduleConfig, step: int, steps: int, total_steps: int) -> float:
    """Ratio at `step` of the `steps` that follow the warm-up."""
    if isinstance(config, ConstantSchedule) or steps <= 0:
        return 1.0
    if isinstance(config, LinearSchedule):
        return _line((steps - step) / steps, config.min_ratio)
    if isinstance(config, CosineSchedule):
        return _line(0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))), config.min_ratio)
    assert isinstance(config, WsdSchedule), config
    decay = min(steps, math.ceil(config.decay_ratio * total_steps - 1e-9))
    into_decay = step - (steps - decay)
    return 1.0 if into_decay <= 0 or not decay else _line((decay - into_decay) / decay, config.min_ratio)


def _line(left: float, min_ratio: float) -> float:
    """From 1 (left = 1) to min_ratio (left = 0)."""
    left = max(left, 0.0)
    return left + (1 - left) * min_ratio
