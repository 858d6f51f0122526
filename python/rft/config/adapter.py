"""[adapter]: what is trained. Left out, a LoRA with the defaults; `name = "none"` is full fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from rft.config.table import Table


class LoraConfig(Table):
    """LoRA through PEFT."""

    name: Literal["lora"] = "lora"
    r: int = Field(16, ge=1, le=65_536)
    """Rank."""
    alpha: float | None = Field(None, ge=0, le=1e6)
    """Scale numerator: the update is multiplied by alpha / r. Default 2 r."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """`all-linear` = every linear of the decoder layers (MoE models: attention only); else names or endings of module names."""
    path: str | None = None
    """An adapter in PEFT's format to go on training. Its rank and targets are kept."""
    rslora: bool = False
    """Scale by alpha / sqrt(r)."""
    dora: bool = False
    """Weight-decomposed LoRA."""
    init: Literal["default", "gaussian", "pissa", "olora"] = "default"
    """How A and B start. `pissa` and `olora` read whole base weights: refused when sharded."""
    bias: Literal["none", "lora_only"] = "none"
    """Which biases are trained."""
    modules_to_save: list[str] = []
    """Modules that are trained in full and saved with the adapter."""

    @field_validator("targets")
    @classmethod
    def _some(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("no choice of modules: leave it out for all linears of the decoder layers")
        return value


class FullConfig(Table):
    """Full fine-tuning: every weight of the text model is trained."""

    name: Literal["none"] = "none"


def _name(value: Any) -> str:
    return value.get("name", "lora") if isinstance(value, dict) else getattr(value, "name", "lora")


AdapterConfig = Annotated[Annotated[LoraConfig, Tag("lora")] | Annotated[FullConfig, Tag("none")], Discriminator(_name)]
