"""Decoder layers that keep little and are computed again in the backward pass; their attention may be kept.

`none`: everything is kept. `full`: a layer keeps its input. A number n: so does every n-th. `selective`: a layer keeps its input and the
output and log-sum-exp of its attention, so that everything is computed again but attention, which grows with the square of the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rft.errors import Refused
from rft.memory.offload import Offloader
from rft.memory.plan import Recompute, recomputed
from rft.memory.weights import WeightStream
from rft.models.attention_kept import KeptAttention

Call = Callable[..., Any]


def why_not(layers: Sequence[nn.Module]) -> str | None:
    """Why these layers cannot be computed again, or None."""
    other = next((type(layer).__name__ for layer in layers if not hasattr(layer, "gradient_checkpointing")), None)
    return None if other is None else f"{other} has no checkpointing of transformers' layers"


def apply_recompute(
    layers: Sequence[nn.Module], recompute: Recompute, offloader: Offloader | None = None, *, count: int | None = None,
    weights: WeightStream | None = None,
) -> int:  # fmt: skip
    """Mark the layers, in place, and return how many are computed again. Raises Refused where the model's layers have no place for it.

    Before compile and sharding. It sets what `transformers` itself reads in each layer's call, without its
    `gradient_checkpointing_enable`, which would ask for a gradient of the embeddings below the first adapter.
    offloader: takes what the layers keep; every layer is marked then. count: of how many layers; None = of all that `recompute` names.
    weights: brings those of a layer when it is computed again.
    """
    chosen = set(recomputed(recompute, len(layers), count))
    marked = range(len(layers)) if offloader is not None else chosen
    if marked and (why := why_not(layers)):
        what = f"memory.recompute = {recompute!r}" if chosen else f'memory.offload = "{offloader and offloader.where}"'
        raise Refused(what, why, do='set memory.recompute = "none" and leave out memory.offload')
    for index, module in enumerate(layers):
        layer: Any = module
        if index not in marked:
            if hasattr(layer, "gradient_checkpointing"):
                layer.gradient_checkpointing = (
                    False  # an earlier plan of this run may have marked it, with what it pinned
                )
                layer.__dict__.pop("_gradient_checkpointing_func", None)
            continue
        layer.gradient_checkpointing = True
        run: Call = _run_once
        if index in chosen:
            arrive = None if weights is None else partial(weights.again, index)
            run = partial(_selective if recompute == "selective" else _full, _draws(layer), offloader, arrive)
        layer._gradient_checkpointing_func = (
            run if offloader is None else partial(_offloaded, offloader, index, layer, run)
        )
    return len(chosen)


def _draws(layer: nn.Module) -> bool:
    """Whether anything random is inside. Else the generators' states need not be saved and set again, two copies a layer."""
    dropouts = (isinstance(m, nn.Dropout) and m.p > 0 for m in layer.modules())
    return any(dropouts) or any(getattr(m, "attention_dropout", 0.0) for m in layer.modules())


def _run_once(call: Call, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


Arrive = Callable[[], AbstractContextManager[None]] | None
"""Makes the context around a recomputation in which the layer's weights are there; None: they always are."""


def _full(draws: bool, offloader: Offloader | None, arrive: Arrive, call: Call, *args: Any, **kwargs: Any) -> Any:
    contexts: dict[str, Any] = {} if arrive is None else {"context_fn": lambda: (nullcontext(), arrive())}
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=draws, **contexts, **kwargs)


def _selective(draws: bool, offloader: Offloader | None, arrive: Arrive, call: Call, *args: Any, **kwargs: Any) -> Any:
    kept = KeptAttention() if offloader is None else KeptAttention(offloader.pack, offloader.unpack)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        first, again = kept.contexts()
        return first, again if arrive is None else _Both(arrive(), again)

    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts, **kwargs)


class _Both:
    """Two contexts, the second inside the first; may be entered again."""

    def __init__(self, first: Any, second: Any):
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        self._second.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._second.__exit__(*error)
        self._first.__exit__(*error)


def _offloaded(
    offloader: Offloader, index: int, layer: nn.Module, run: Call, call: Call, *args: Any, **kwargs: Any
) -> Any:
    with offloader.layer(index, layer):
        return run(call, *args, **kwargs)
