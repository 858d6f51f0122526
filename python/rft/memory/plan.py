"""What the planner decides and training carries out. The resolved config is its only carrier: `MemoryPlan.of` reads it from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rft.config.root import Config

Recompute = Literal["none", "selective", "full"] | int
"""Decoder layers that are computed again: none, all but their attention, all, or every n-th."""
Place = Literal["none", "cpu", "disk"]
"""Where something is kept instead of on the GPU."""


@dataclass(frozen=True)
class MemoryPlan:
    """How one rank runs a step. No `auto` is left in it."""

    recompute: Recompute = "none"
    offload: Place = "none"
    """Where what recomputed layers keep lies; without recompute, where all saved tensors lie."""
    tiled_mlp: int = 1
    """Tiles of the sequence in which every MLP is computed; 1: whole."""
    chunk_rows: int | Literal["least"] = 4096
    """Labelled rows whose logits exist at one time."""
    micro_batch: int = 1
    offload_states: Place = "none"
    """Where masters and optimizer states lie."""
    in_backward: bool = False
    """Whether the optimizer's step of a parameter is made as soon as its gradient is there."""

    @classmethod
    def of(cls, config: Config) -> MemoryPlan:
        """The plan in a resolved config. Keys that this version's config does not have are at their default."""
        memory: Any = config.memory
        recompute, micro_batch, rows = memory.recompute, config.train.micro_batch, config.loss.chunk_rows
        assert recompute != "auto", "resolve() decides memory.recompute"
        assert isinstance(micro_batch, int), "resolve() decides train.micro_batch"
        assert rows != "auto", "resolve() decides loss.chunk_rows"
        return cls(
            recompute=recompute,
            offload=getattr(memory, "offload", "none"),
            tiled_mlp=getattr(memory, "tiled_mlp", 1),
            chunk_rows=rows,
            micro_batch=micro_batch,
            offload_states=getattr(memory, "offload_states", "none"),
            in_backward=bool(getattr(config.optim, "in_backward", False)),
        )


def config_with(config: Config, plan: MemoryPlan) -> Config:
    """The config with what the plan says. Raises ValueError where this version's config has no key for it."""
    memory: dict[str, Any] = {
        "recompute": plan.recompute,
        "offload": plan.offload,
        "tiled_mlp": plan.tiled_mlp,
        "offload_states": plan.offload_states,
    }
    plain = MemoryPlan()
    known = type(config.memory).model_fields
    for key in list(memory):
        if key not in known:
            if memory[key] != getattr(plain, key):
                raise ValueError(f"memory.{key} = {memory[key]!r}: this version has no such key")
            del memory[key]
    tables = {
        "memory": config.memory.model_copy(update=memory),
        "loss": config.loss.model_copy(update={"chunk_rows": plan.chunk_rows}),
        "train": config.train.model_copy(update={"micro_batch": plan.micro_batch}),
    }
    return config.model_copy(update=tables)
