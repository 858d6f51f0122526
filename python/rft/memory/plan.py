"""What the planner decides and training carries out. The resolved config is its only carrier: `MemoryPlan.of` reads it from there."""

from __future__ import annotations

from collections.abc import Sequence
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
    recompute_layers: int | None = None
    """How many layers are computed again, spread evenly; None: all that `recompute` names."""
    offload: Place = "none"
    """Where what layers keep for the backward pass lies."""
    offload_layers: int | None = None
    """Of how many layers, spread evenly, those first that are not computed again; None: of all."""
    tiled_mlp: int = 1
    """Tiles of the sequence in which every MLP is computed; 1: whole."""
    chunk_rows: int | Literal["least"] = 4096
    """Labelled rows whose logits exist at one time."""
    micro_batch: int = 1
    offload_states: Place = "none"
    """Where masters and optimizer states lie."""
    offload_weights: Literal["none", "cpu"] = "none"
    """Where the weights of the decoder layers lie while their layer is not worked on."""
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
            recompute_layers=_layers(memory.recompute_layers),
            offload=getattr(memory, "offload", "none"),
            offload_layers=_layers(memory.offload_layers),
            tiled_mlp=getattr(memory, "tiled_mlp", 1),
            chunk_rows=rows,
            micro_batch=micro_batch,
            offload_states=memory.offload_states,
            offload_weights=memory.offload_weights,
            in_backward=bool(getattr(config.optim, "in_backward", False)),
        )


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of these, evenly from the first on; the last is among them only where all are."""
    return [items[i * len(items) // count] for i in range(count)]


def recomputed(recompute: Recompute, num_layers: int, count: int | None = None) -> list[int]:
    """Which layers are computed again: none, every n-th counted from the first, whose activations are held longest, all, or `count` of them."""
    if recompute == "none":
        return []
    named = list(range(0, num_layers, recompute if isinstance(recompute, int) else 1))
    return named if count is None else spread(named, min(count, len(named)))


def offloaded(recomputed: Sequence[int], num_layers: int, count: int | None = None) -> list[int]:
    """Which layers' kept tensors leave the GPU: `count` of them, those first that are not computed again; None: all."""
    if count is None or count >= num_layers:
        return list(range(num_layers))
    again = set(recomputed)
    whole = [i for i in range(num_layers) if i not in again]
    rest = count - len(whole)
    return spread(whole, count) if rest <= 0 else sorted([*whole, *spread(list(recomputed), rest)])


def _layers(given: int | Literal["auto", "all"]) -> int | None:
    return given if isinstance(given, int) else None


def config_with(config: Config, plan: MemoryPlan) -> Config:
    """The config with what the plan says."""
    memory: dict[str, Any] = {
        "recompute": plan.recompute,
        "recompute_layers": plan.recompute_layers or "all",
        "offload": plan.offload,
        "offload_layers": plan.offload_layers or "all",
        "tiled_mlp": plan.tiled_mlp,
        "offload_states": plan.offload_states,
        "offload_weights": plan.offload_weights,
    }
    tables = {
        "memory": config.memory.model_copy(update=memory),
        "loss": config.loss.model_copy(update={"chunk_rows": plan.chunk_rows}),
        "train": config.train.model_copy(update={"micro_batch": plan.micro_batch}),
    }
    return config.model_copy(update=tables)
