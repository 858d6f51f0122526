"""[optim]: optimizer, learning rate and its schedule."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Tag,
    field_validator,
    model_validator,
)

from rft.config.table import Table


class _Schedule(Table):
    warmup_steps: NonNegativeInt | None = None
    """Optimizer steps of linear warm-up."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """Share of all steps that is warm-up, rounded up. Not together with warmup_steps. Default 0.03 where neither is given."""


class ConstantSchedule(_Schedule):
    """Warm-up, then the full rate."""

    name: Literal["constant"] = "constant"


class LinearSchedule(_Schedule):
    """Warm-up, then a straight line to min_ratio times the rate at the end."""

    name: Literal["linear"] = "linear"
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Rate at the end over the full rate."""


class CosineSchedule(_Schedule):
    """Warm-up, then half a cosine to min_ratio times the rate at the end."""

    name: Literal["cosine"] = "cosine"
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Rate at the end over the full rate."""


class WsdSchedule(_Schedule):
    """Warm-up, stable, then a straight decay over the last decay_ratio of the steps."""

    name: Literal["wsd"] = "wsd"
    decay_ratio: float = Field(0.1, ge=0, le=1)
    """Share of all steps that is decay."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Rate at the end over the full rate."""


def _schedule_name(value: Any) -> str:
    return value.get("name", "cosine") if isinstance(value, dict) else getattr(value, "name", "cosine")


ScheduleConfig = Annotated[
    Annotated[ConstantSchedule, Tag("constant")]
    | Annotated[LinearSchedule, Tag("linear")]
    | Annotated[CosineSchedule, Tag("cosine")]
    | Annotated[WsdSchedule, Tag("wsd")],
    Discriminator(_schedule_name),
]


class GroupConfig(Table):
    """Parameters whose names match get a rate or weight decay of their own. The first match counts."""

    match: str
    """Regular expression, searched in the parameter's name."""
    lr: PositiveFloat | None = None
    """Learning rate of these parameters."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of these parameters."""

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _changes_something(self) -> GroupConfig:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("without lr and weight_decay: it would change nothing")
        return self


class AdamWConfig(Table):
    """AdamW; weight decay on matrices only, never on norms, biases and embeddings."""

    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat | Literal["auto"] = "auto"
    """Peak learning rate. auto: 2e-4 for LoRA, 1e-5 for full fine-tuning."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.999], min_length=2, max_length=2)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    schedule: ScheduleConfig = CosineSchedule()
    """How the rate moves over the run."""
    groups: list[GroupConfig] = []
    """Rates of their own for parameters by name."""


OptimConfig = AdamWConfig  # becomes a union told apart by `name` with the second optimizer
