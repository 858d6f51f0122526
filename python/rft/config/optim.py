"""[optim]: optimizer, learning rate and its schedule."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rft.config.table import CountOrNone, Table

DEFAULT_WARMUP_RATIO = 0.03
"""Of the steps, where neither `warmup_steps` nor `warmup_ratio` is given."""


Rate = Annotated[float, Field(gt=0, le=10_000)]
Decay = Annotated[float, Field(ge=0, le=100)]
Epsilon = Annotated[float, Field(gt=0, le=10)]


class _Schedule(Table):
    warmup_steps: CountOrNone | None = None
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
    lr: Rate | None = None
    """Learning rate of these parameters."""
    weight_decay: Decay | None = None
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


Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
States = Literal["float32", "bfloat16"]


class _Optimizer(Table):
    """Keys that every optimizer has. Its name comes first in each."""

    name: str
    lr: Rate | Literal["auto"] = "auto"
    """Peak learning rate. auto: 2e-4 for LoRA, 1e-5 for full fine-tuning; a fifth of these for Lion, whose every update is a full step."""
    weight_decay: Decay = 0.0
    """Decoupled weight decay; on matrices only, never on norms, biases and embeddings."""
    schedule: ScheduleConfig = CosineSchedule()
    """How the rate moves over the run."""
    groups: list[GroupConfig] = []
    """Rates of their own for parameters by name."""
    lora_plus_ratio: float | None = Field(None, ge=1, le=10_000)
    """LoRA+: the rate of every B matrix is that of A times this (16 in the paper). A group of its own for a B comes first."""
    in_backward: bool = False
    """Update each weight as soon as its gradient is there, and free the gradient. One process, one micro-batch a step, train.max_grad_norm = "none"."""


class AdamWConfig(_Optimizer):
    """AdamW."""

    name: Literal["adamw"] = "adamw"
    betas: Betas = [0.9, 0.999]
    """Decay of the first and second moment."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""
    states: States = "float32"
    """Type of the moments. `bfloat16` halves them; they are rounded stochastically, so that small changes add up."""


class AdamW8bitConfig(_Optimizer):
    """AdamW whose moments are 8-bit codes with a scale a block. Tensors under 4,096 numbers keep fp32 moments. Not sharded."""

    name: Literal["adamw_8bit"] = "adamw_8bit"
    betas: Betas = [0.9, 0.999]
    """Decay of the first and second moment."""
    eps: Epsilon = 1e-8
    """Added to the denominator."""
    library: Literal["bitsandbytes", "torchao"] = "bitsandbytes"
    """Whose code format and kernels. torchao is an extra: `pip install 'rft-llm[torchao]'`."""
    paged: bool = False
    """Moments in memory that CUDA moves between GPU and host as needed (bitsandbytes on CUDA)."""


class AdafactorConfig(_Optimizer):
    """Adafactor: of each matrix's second moment a row and a column are kept; no first moment, absolute rates. Not sharded."""

    name: Literal["adafactor"] = "adafactor"
    decay: float = Field(0.8, gt=0, le=1)
    """The second moment of step t decays by 1 - t^-decay."""
    clip: float = Field(1.0, gt=0, le=1e6)
    """Largest root mean square of an update, before the rate."""


class LionConfig(_Optimizer):
    """Lion: the sign of an average of gradients; one moment."""

    name: Literal["lion"] = "lion"
    betas: Betas = [0.9, 0.99]
    """Share of the moment in the update, and its decay."""
    states: States = "float32"
    """Type of the moment. `bfloat16` halves it, rounded stochastically."""


class MuonConfig(_Optimizer):
    """Muon: momentum of hidden matrices made orthogonal, scaled to the size of AdamW's updates; AdamW for embeddings, head, norms and biases."""

    name: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Fraction of the last update kept."""
    nesterov: bool = True
    """Look one step ahead."""
    iterations: int = Field(5, ge=1, le=20)
    """Newton-Schulz iterations."""
    betas: Betas = [0.9, 0.999]
    """Of AdamW."""
    eps: Epsilon = 1e-8
    """Of AdamW."""


def _optimizer_name(value: Any) -> str:
    return value.get("name", "adamw") if isinstance(value, dict) else getattr(value, "name", "adamw")


OptimConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")]
    | Annotated[AdamW8bitConfig, Tag("adamw_8bit")]
    | Annotated[AdafactorConfig, Tag("adafactor")]
    | Annotated[LionConfig, Tag("lion")]
    | Annotated[MuonConfig, Tag("muon")],
    Discriminator(_optimizer_name),
]


def state_bytes_per_number(config: OptimConfig) -> float:
    """Bytes of optimizer state for each trained number, of large matrices; Muon's embeddings and head take 8."""
    if isinstance(config, AdamW8bitConfig):
        return 2 + 2 * 4 / 256
    if isinstance(config, AdafactorConfig):
        return 0.01
    if isinstance(config, MuonConfig):
        return 4.0
    size = 4.0 if config.states == "float32" else 2.0
    return size if isinstance(config, LionConfig) else 2 * size
