"""Decoder layers under `torch.compile`, each as one graph (`fullgraph`), with attention and our kernels as opaque ops inside.

Compiled is what lies within checkpointing, offloading and sharding, which see a layer as before. What differs from batch to batch and only attention
reads (documents, their borders) stays outside of the graph, so that a graph is good for every batch of its length: a run makes one for each kind
of layer in training, one in evaluation, and more where rows of another length come.
Before a layer is used so in training it is compared with itself as it was, output and gradients, on the batch at hand; what cannot be
compiled whole, or differs, goes on as it was, and says so.
"""

from __future__ import annotations

import inspect
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.graph import saved_tensors_hooks

from rft.closeness import relative_error
from rft.models.attention import AttentionState, attending
from rft.models.attention_kept import outside
from rft.models.attention_opaque import handed_over
from rft.models.decoder_layer import names_behind_first
from rft.models.documents import DocumentMask

BACKEND = "inductor"
MOST_GRAPHS = 64
"""Of all layers of one class. torch's own limit of 8 is for code that is compiled anew by mistake."""
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error of a layer's output and gradients against the layer itself: what rounding in another order gives."""
_BATCH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What says where documents end, to kinds of layers that have no DocumentMask; it changes with every batch."""


@dataclass
class _Layer:
    """What is known of one layer."""

    why_not: str | None
    """Why it runs as it was, or None."""
    compared: bool = False


@dataclass
class CompiledLayers:
    """The decoder layers of one model, compiled as they are called first.

    tell: called when every layer is settled, and again when that changes. compare: not where dropout draws anew.
    """

    layers: Sequence[nn.Module]
    state: AttentionState
    backend: str = field(default_factory=lambda: BACKEND)
    compare: bool = True
    tell: Callable[[CompiledLayers], None] = lambda compiled: None
    graphs: int = 0
    """Made so far."""
    seconds: float = 0.0
    """Spent in calls in which a graph was made."""
    checked: dict[str, float] = field(default_factory=dict)
    """Largest relative errors of output and gradients over all layers."""
    _known: dict[int, _Layer] = field(default_factory=dict)
    _calls: dict[type, Callable[..., Any]] = field(default_factory=dict)
    _told: Any = None

    def __post_init__(self) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
        for layer in self.layers:
            why = why_not(layer)
            self._known[id(layer)] = _Layer(why)
            if why is None:
                kind: Any = type(layer)
                self._calls.setdefault(kind, self._compiled(kind))
                layer.__dict__["rft_compiled"] = self
                layer.__class__ = _compiled_class(kind)

    @property
    def count(self) -> int:
        """Layers that run compiled."""
        return sum(known.why_not is None for known in self._known.values())

    @property
    def declined(self) -> dict[str, int]:
        """Why layers are not compiled, and how many."""
        return dict(Counter(known.why_not for known in self._known.values() if known.why_not is not None))

    def describe(self) -> str:
        """For receipts."""
        return (
            f"{self.graphs} graph{'s' if self.graphs != 1 else ''}, none broken, {self.seconds:.0f} s; attention and kernels are ops inside"
            + ("" if self.compare else "; not compared, since dropout draws anew")
        )

    def _compiled(self, kind: type) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        inner = lookup_backend(self.backend)

        def backend(module: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
            self.graphs += 1
            return inner(module, inputs, **kwargs)

        forward = _without_checkpointing(kind.forward)  # type: ignore[attr-defined]

        def call(layer: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]) -> Any:
            return forward(layer, hidden_states, **kwargs)

        # code of its own: graphs are kept with the code, and those of another model would be tried first, and counted
        own = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
        return torch.compile(own, backend=backend, fullgraph=True, dynamic=False)

    def run(
        self, kind: type, layer: nn.Module, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The layer's forward. kind: its class before ours."""
        eager = _without_checkpointing(kind.forward)  # type: ignore[attr-defined]
        known = self._known[id(layer)]
        kwargs.update(zip(names_behind_first(getattr(kind, "rft_original", kind)), args, strict=False))
        mask = kwargs.get("attention_mask")
        training = layer.training and torch.is_grad_enabled()
        if training and known.why_not is None and not isinstance(mask, DocumentMask):
            known.why_not = "no documents reach it"
        # without documents: generation, stock calls; not compared: the evaluation before the first step
        if known.why_not is not None or not isinstance(mask, DocumentMask) or not (training or known.compared):
            out = eager(layer, hidden_states, **kwargs)
            if training and layer is self.layers[-1]:
                self._tell()
            return out
        inside = {name: value for name, value in kwargs.items() if name not in _BATCH}
        inside["attention_mask"] = None
        attend = attending(type(layer).__name__, self.state, mask)

        def compiled(hidden_states: Tensor) -> Any:
            with handed_over(attend):
                return self._counted(self._calls[kind], layer, hidden_states, inside)

        try:
            if training and not known.compared:
                known.compared = True
                known.why_not = self._fails(layer, hidden_states, lambda x: eager(layer, x, **kwargs), compiled)
            out = eager(layer, hidden_states, **kwargs) if known.why_not is not None else compiled(hidden_states)
        except TorchDynamoException as error:  # raised while a graph is made: nothing of the layer has run yet
            known.why_not = f"it cannot be compiled whole: {_first_line(error)}"
            out = eager(layer, hidden_states, **kwargs)
        if layer is self.layers[-1]:
            self._tell()
        return out

    def _counted(self, call: Callable[..., Any], *args: Any) -> Any:
        before, began = self.graphs, time.perf_counter()
        out = call(*args)
        if self.graphs != before:
            self.seconds += time.perf_counter() - began
        return out

    def _fails(
        self, layer: nn.Module, hidden_states: Tensor, eager: Callable[[Tensor], Any], compiled: Callable[[Tensor], Any]
    ) -> str | None:
        """Why the compiled layer may not stand in for it, or None."""
        calls = self.state.calls
        try:
            with _aside(hidden_states.device):
                truth, own = (_out_and_gradients(layer, call, hidden_states) for call in (eager, compiled))
        except (torch.OutOfMemoryError, TorchDynamoException):
            raise
        except RuntimeError as raised:
            # whatever generated code says; where it is the layer's own, its forward says it again
            return f"compiled, it fails: {_first_line(raised)}"
        finally:
            self.state.calls = calls
        if not self.compare:
            return None
        allowed = ALLOWED[hidden_states.dtype]
        for name, value in truth.items():
            error = relative_error(own[name], value)
            if not error <= allowed:
                return f"compiled, its {name} differs by {error:.1e} (allowed {allowed:g})"
            which = name.split()[0]
            self.checked[which] = max(self.checked.get(which, 0.0), error)
        return None

    def _tell(self) -> None:
        if any(known.why_not is None and not known.compared for known in self._known.values()):
            return
        now = self.graphs, self.declined
        if now != self._told:
            self._told = now
            self.tell(self)


def why_not(layer: nn.Module) -> str | None:
    """Why a layer is not tried, or None. What only shows when it is traced is found then."""
    if not any("position_embeddings" in inspect.signature(m.forward).parameters for m in layer.children()):
        return "it has no attention of the kind that gets rotary tables"
    if any(isinstance(m, nn.Conv1d) for m in layer.modules()):
        return "it mixes tokens by a convolution, which reads the documents' borders"
    part = next((n for n, m in layer.named_modules() if n and "forward" in m.__dict__), None)
    return None if part is None else f"its {part} is computed in pieces"


@contextmanager
def _aside(device: torch.device):
    """Inside, nothing that is called is saved, kept or drawn for the step."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), saved_tensors_hooks(_same, _same), outside(), torch.enable_grad():
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _out_and_gradients(layer: nn.Module, call: Callable[[Tensor], Any], hidden_states: Tensor) -> dict[str, Tensor]:
    x = hidden_states.detach().requires_grad_(hidden_states.requires_grad)
    out = call(x)
    out = out[0] if isinstance(out, tuple) else out
    named: dict[str, Tensor] = {f"gradient of {n}": p for n, p in layer.named_parameters() if p.requires_grad}
    if x.requires_grad:
        named["gradient of its input"] = x
    found = {"output": out.detach()}
    if named:
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        gradients = torch.autograd.grad(out, list(named.values()), slope, allow_unused=True)
        found |= {name: g.detach() for name, g in zip(named, gradients, strict=True) if g is not None}
    return found


def _first_line(error: BaseException) -> str:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    more = [line for line in said if line.startswith("Explanation:")]  # the first line is a heading then
    return f"{type(error).__name__}: {' '.join([*said[:1], *more[:1]])}"[:300]


def _without_checkpointing(forward: Any) -> Any:
    """A layer's forward without what `transformers` puts around it: our class has that around itself."""
    while getattr(getattr(forward, "__code__", None), "co_name", "") == "forward_with_checkpointing":
        forward = forward.__wrapped__
    return forward


@cache
def _compiled_class(kind: Any) -> type:
    """A subclass whose forward is the compiled one; checkpointing comes around it as around the original's."""

    @wraps(_without_checkpointing(kind.forward))
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["rft_compiled"].run(kind, self, hidden_states, args, kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
