"""Decoder layers that keep their input alone and are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from rft.errors import Refused


def recomputed(recompute: Literal["none", "full"] | int, num_layers: int) -> list[int]:
    """Which layers: all, none, or every n-th counted from the first, whose activations are held longest."""
    if recompute == "none":
        return []
    return list(range(0, num_layers, 1 if recompute == "full" else recompute))


def why_not(layers: Sequence[nn.Module]) -> str | None:
    """Why these layers cannot be computed again, or None."""
    other = next((type(layer).__name__ for layer in layers if not hasattr(layer, "gradient_checkpointing")), None)
    return None if other is None else f"{other} has no checkpointing of transformers' layers"


def apply_recompute(layers: Sequence[nn.Module], recompute: Literal["none", "full"] | int) -> int:
    """Mark the layers, in place, and return how many. Raises Refused where the model's layers have no place for it.

    Before compile and sharding. It sets what `transformers` itself reads in each layer's call, without its
    `gradient_checkpointing_enable`, which would ask for a gradient of the embeddings below the first adapter.
    """
    chosen = recomputed(recompute, len(layers))
    if chosen and (why := why_not(layers)):
        raise Refused(f"memory.recompute = {recompute!r}", why, do='set memory.recompute = "none"')
    for index in chosen:
        layer: Any = layers[index]
        keep_rng = any(isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules()) or _attention_drops(layer)
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = _checkpoint_with_rng if keep_rng else _checkpoint
    return len(chosen)


def _attention_drops(layer: nn.Module) -> bool:
    return any(getattr(m, "attention_dropout", 0.0) for m in layer.modules())


def _checkpoint(call: Any, *args: Any, **kwargs: Any) -> Any:
    # Nothing random inside: the generators' states need not be saved and set again, two copies a layer
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _checkpoint_with_rng(call: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
