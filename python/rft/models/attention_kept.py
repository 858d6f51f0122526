"""Attention that is not computed again with its layer: output and log-sum-exp are kept, q, k and v are made again.

`torch.utils.checkpoint` computes a region again and gives its nodes what they would have saved. Its selective form can leave out
registered ops alone, and an `autograd.Function`, as FA4 is one, is invisible to it (kernels.md). So this works for any backend: in the first
pass what the backend saves is really kept, save for its inputs; in the second the kept output stands in for the call. The inputs
are saved a second time, behind the output and through checkpoint's own hooks: the node that does so runs before attention's backward and
hands them over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

_current = local()


class _View(NamedTuple):
    """A saved tensor that lies in the memory of an input."""

    inputs: _Inputs
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Inputs:
    """q, k and v of one call: there once they were made again."""

    layout: tuple[tuple[tuple[int, ...], int], ...]
    """Strides and storage offset of each, in the first pass."""
    tensors: tuple[Tensor, ...] | None = None


@dataclass
class KeptAttention:
    """What one pass of one layer keeps of its attention."""

    pack: Pack = lambda tensor: tensor
    """What is done with a kept tensor: identity, or offloading."""
    unpack: Unpack = lambda held: held
    outputs: list[Any] = field(default_factory=list)
    """Packed, of each call in order; None once it was handed back."""

    def contexts(self) -> tuple[_Pass, _Pass]:
        """Around the forward and around the recomputation: what `checkpoint(context_fn=...)` takes."""
        return _Pass(self, again=False), _Pass(self, again=True)


class _Pass:
    """A context that may be entered again: a graph that is kept is recomputed for every backward."""

    def __init__(self, kept: KeptAttention, *, again: bool):
        self._state = kept, again

    def __enter__(self) -> None:
        kept, again = self._state
        self._outer = getattr(_current, "state", None)
        if not again:
            kept.outputs.clear()
        _current.state = (kept, iter(range(len(kept.outputs))) if again else None)

    def __exit__(self, *_: object) -> None:
        _current.state = self._outer


def current_pass() -> tuple[KeptAttention | None, Any]:
    """(what the running layer keeps, numbers of the outputs that are handed back or None in the first pass); (None, None) outside of one."""
    return getattr(_current, "state", None) or (None, None)


@contextmanager
def outside() -> Iterator[None]:
    """Inside, nothing is kept: for calls beside those that the layer itself makes."""
    outer = getattr(_current, "state", None)
    _current.state = None
    try:
        yield
    finally:
        _current.state = outer


def keep(call: Callable[[], Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """`call()`, or its kept output where the layer is computed again. inputs: q, k, v. It may not draw random numbers."""
    state = getattr(_current, "state", None)
    if state is None or not torch.is_grad_enabled():
        return call()
    kept, replay = state
    if replay is not None:
        number = next(replay)
        # taken out: this object lives until the whole backward is over, the output is wanted for this layer's alone
        held, kept.outputs[number] = kept.outputs[number], None
        if held is None:  # a graph that was kept goes backward once more
            with torch.no_grad():
                out = call()
        else:
            out = kept.unpack(held).detach()
        return _HandOver.apply(out.requires_grad_(), None, *inputs)  # type: ignore[no-any-return]
    own = _Inputs(tuple((t.stride(), int(t.storage_offset())) for t in inputs))
    places = {t.untyped_storage().data_ptr(): number for number, t in enumerate(inputs)}

    def pack(tensor: Tensor) -> Any:
        number = places.get(tensor.untyped_storage().data_ptr())
        if number is not None:
            return _View(own, number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return tensor if isinstance(tensor, torch.nn.Parameter) else kept.pack(tensor)

    def unpack(held: Any) -> Tensor:
        if isinstance(held, torch.nn.Parameter):
            return held
        if not isinstance(held, _View):
            return kept.unpack(held)
        assert held.inputs.tensors is not None, "_HandOver's backward comes before attention's"
        return held.inputs.tensors[held.number].as_strided(held.size, held.stride, held.offset)

    with saved_tensors_hooks(pack, unpack):
        out = call()
    kept.outputs.append(kept.pack(out.detach()))
    return _HandOver.apply(out, own, *inputs)  # type: ignore[no-any-return]


class _HandOver(torch.autograd.Function):
    """The output unchanged. Its backward gets q, k and v from checkpoint, which makes them again, and leaves them for attention's."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, own: _Inputs | None, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.own = own
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs = ctx.saved_tensors
        # this node lives until the whole backward is over: from here on only what attention saved holds on to q, k and v
        own, ctx.own = ctx.own, None
        if own is not None:
            found = tuple((t.stride(), t.storage_offset()) for t in inputs)
            assert found == own.layout, "a layer that is computed again lays out q, k and v as before"
            own.tensors = inputs
        return (d_out, None, *([None] * len(inputs)))
