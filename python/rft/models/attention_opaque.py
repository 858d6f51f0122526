"""Attention as one registered op, for layers that `torch.compile` takes whole: what a batch's documents are never enters the graph.

Whoever runs a compiled layer leaves the documents with `handed_over`; the op finds them when it runs, so a graph is good for every
batch of its length. Any backend may be inside: its own autograd graph is made as in eager mode and kept behind a ticket, a CPU tensor of one number
that compiled code saves for the backward. When the ticket's memory goes, so does the graph. That graph holds neither the op's inputs nor its output,
whose memory belongs to compiled code: the backward op is given them again.
Shapes: B batch, H heads, T tokens, E head size.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rft.models.attention_kept import current_pass

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query, key, value, sinks) -> [B, T, H, Ev]."""
Attend = Callable[..., tuple[Run, bool]]
"""(query, key, value, sinks, scale, dropout, softcap, window) -> what to run, and whether its output may be kept where a layer is computed again."""

_running = threading.local()


@contextmanager
def handed_over(attend: Attend) -> Iterator[None]:
    """Inside, attention ops on this thread are over what `attend` knows."""
    outer = getattr(_running, "attend", None)
    _running.attend = attend
    try:
        yield
    finally:
        _running.attend = outer


class _Ticket(np.ndarray):
    """Memory of a ticket: lives as long as the tensor's storage, and holds the call."""

    call: _Call


class _View(NamedTuple):
    """A saved tensor that lies in an input or in the output."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the first element of that tensor."""


class _Layout(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _Call:
    """One call's own graph, from its inputs to its output."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]):
        self._outer = pack, unpack
        self._places: dict[int, tuple[int, int]] = {}
        """By address of the storage: which tensor, and its offset."""
        self._layouts: list[_Layout] = []
        self._tensors: list[Tensor] = []
        """Inputs, then the output, while the backward runs."""
        self.gradients: tuple[Tensor | None, ...] = ()
        self._d_out: Tensor | None = None
        self._end: Any = None
        """An empty tensor behind the output: holds the graph."""
        self._late: list[_Late] = []

    def forward(self, run: Run, inputs: tuple[Tensor | None, ...]) -> Tensor:
        given = [t for t in inputs if t is not None]  # query, key, value, and sinks where there are any
        anchor = given[0].new_empty(()).requires_grad_()
        own = weakref.ref(self)

        # The graph holds its hooks, and this object the graph: a ring of which C++ holds a part, so no collector would find it.
        def pack(tensor: Tensor) -> Any:
            call = own()
            assert call is not None
            return call._pack(tensor)

        def unpack(late: _Late) -> Tensor:
            call = own()
            assert call is not None
            return call._unpack(late)

        with saved_tensors_hooks(pack, unpack):
            # joint projections: which of them a saved tensor lies in could not be told, so each gets memory of its own
            addresses = [t.untyped_storage().data_ptr() for t in given]
            if len(set(addresses)) < len(addresses):
                given = [t.clone() for t in given]
            else:
                self._note(given)
            parts = iter(_Entry.apply(anchor, self, *given))
            query, key, value = (next(parts) for _ in range(3))
            out = run(query, key, value, next(parts, None))
            self._end = _Exit.apply(out, self)
        # what was saved before it was known where the output lies
        self._places[out.untyped_storage().data_ptr()] = (len(given), int(out.storage_offset()))
        self._layouts = [_Layout(tuple(t.shape), t.stride()) for t in (*given, out)]
        for late in self._late:
            late.settle(self)
        self._late.clear()
        self._places.clear()  # an address means nothing once its memory was given back
        return out.detach()

    def backward(self, d_out: Tensor, given: list[Tensor]) -> tuple[Tensor | None, ...]:
        self._tensors, self._d_out = given, d_out
        try:
            torch.autograd.backward(self._end, torch.empty_like(self._end), retain_graph=True)
            return self.gradients
        finally:
            self._tensors, self._d_out, self.gradients = [], None, ()

    def _note(self, given: list[Tensor]) -> None:
        for number, t in enumerate(given):
            self._places[t.untyped_storage().data_ptr()] = (number, int(t.storage_offset()))

    def held(self, tensor: Tensor) -> Any:
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is None:
            return None
        number, offset = place
        return _View(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()) - offset)

    def _pack(self, tensor: Tensor) -> Any:
        late = _Late(tensor)
        self._late.append(late)
        return late

    def _unpack(self, late: _Late) -> Tensor:
        if (
            late.tensor is not None
        ):  # computed again inside (a checkpoint of the backend's own), before the call is over
            return late.tensor
        held = late.held
        if not isinstance(held, _View):
            return self._outer[1](held)
        whole = _laid_out(self._tensors[held.number], self._layouts[held.number])
        return whole.as_strided(held.size, held.stride, int(whole.storage_offset()) + held.offset)

    def packed(self, tensor: Tensor) -> Any:
        return self._outer[0](tensor)


class _Late:
    """A saved tensor: itself until the call is over, then a view of an input or of the output, or what `pack` made of it."""

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor
        self.held: Any = None

    def settle(self, call: _Call) -> None:
        assert self.tensor is not None
        view = call.held(self.tensor)
        self.held = call.packed(self.tensor) if view is None else view
        self.tensor = None


class _Entry(torch.autograd.Function):
    """The inputs as they are. Its backward leaves their gradients with the call; it keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = weakref.ref(call)
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        ctx.call().gradients = gradients
        return (None, None, *([None] * len(gradients)))


class _Exit(torch.autograd.Function):
    """Where the backward begins, with the gradient that the call was given."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, call: _Call) -> Tensor:
        ctx.call = weakref.ref(call)
        return out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.call()._d_out, None


def _laid_out(tensor: Tensor, layout: _Layout) -> Tensor:
    """With the strides that it had: compiled code may have made it again with others."""
    if tensor.stride() == layout.stride:
        return tensor
    return torch.empty_strided(layout.size, layout.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


_calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _ticket_for(call: _Call) -> Tensor:
    number = next(_numbers)
    memory = np.array([number], dtype=np.int64).view(_Ticket)
    memory.call = call
    _calls[number] = call
    return torch.from_numpy(memory)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd as outside of an op: the dispatcher leaves it out within one."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


_AUTOGRAD = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
]


@torch.library.custom_op("rft::attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, dropout: float, softcap: float | None,
    window: int | None, recorded: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """([B, T, H, Ev], ticket)"""
    attend = getattr(_running, "attend", None)
    assert attend is not None, "a compiled layer runs inside handed_over()"
    run, may_keep = attend(query, key, value, sinks, scale, dropout, softcap, window)
    if not recorded:
        return _own(run(query, key, value, sinks)), torch.zeros(1, dtype=torch.int64)
    inputs = (query, key, value, sinks)
    kept, replay = current_pass() if may_keep else (None, None)
    if kept is not None and replay is not None:
        number = next(replay)
        held, kept.outputs[number] = kept.outputs[number], None
        if held is not None:
            call, packed = held
            return _own(kept.unpack(packed).detach()), _ticket_for(call)
        kept = None  # a graph that was kept goes backward once more
    call = _Call(_same, _same) if kept is None else _Call(kept.pack, kept.unpack)
    with _recording():
        out = call.forward(run, inputs)
    if kept is not None:
        kept.outputs.append((call, kept.pack(out)))
    return out, _ticket_for(call)


def _same(held: Any) -> Any:
    return held


def _own(out: Tensor) -> Tensor:
    return out.contiguous()


@_attention.register_fake
def _(query, key, value, sinks, scale, dropout, softcap, window, recorded):
    B, H, T, _ = query.shape
    return value.new_empty(B, T, H, value.shape[-1]), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("rft::attention_backward", mutates_args=())
def _attention_backward(
    d_out: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ticket: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value and sinks; the last is empty without them."""
    call = _calls.get(int(ticket.item()))
    assert call is not None, "a ticket lives as long as what it was saved for"
    given = [t for t in (query, key, value, sinks) if t is not None]
    with _recording():
        gradients = call.backward(d_out, [*given, out])
    made = [
        torch.zeros_like(t, memory_format=torch.contiguous_format) if g is None else _alone(g.to(t.dtype))
        for g, t in zip(gradients, given, strict=True)
    ]
    if sinks is None:
        made.append(query.new_empty(0))
    return made[0], made[1], made[2], made[3]


def _alone(gradient: Tensor) -> Tensor:
    """Contiguous, and no view of what another result lies in."""
    whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    return gradient.contiguous() if whole else gradient.clone(memory_format=torch.contiguous_format)


@_attention_backward.register_fake
def _(d_out, out, query, key, value, sinks, ticket):
    made = [t.new_empty(t.shape) for t in (query, key, value)]
    return (*made, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape))


def _save(ctx, inputs, output):
    query, key, value, sinks = inputs[:4]
    out, ticket = output
    ctx.has_sinks = sinks is not None
    ctx.save_for_backward(query, key, value, out, ticket, *([] if sinks is None else [sinks]))
    ctx.mark_non_differentiable(ticket)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, _):
    if d_out is None:
        return (None,) * 9
    query, key, value, out, ticket, *rest = ctx.saved_tensors
    sinks = rest[0] if ctx.has_sinks else None
    dq, dk, dv, d_sinks = _attention_backward(d_out, out, query, key, value, sinks, ticket)
    return dq, dk, dv, d_sinks if ctx.has_sinks else None, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_save)


def opaque_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *, scale: float, dropout: float, softcap: float | None,
    window: int | None,
) -> Tensor:  # fmt: skip
    """query [B, H, T, E], key and value [B, Hkv, T, E or Ev] -> [B, T, H, Ev], over the documents of the running layer."""
    return _attention(query, key, value, sinks, scale, dropout, softcap, window, torch.is_grad_enabled())[0]
