"""The decoder without its head, run on one batch."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from rft.errors import Refused
from rft.models.attention import NAME, AttentionState, attention_kwargs
from rft.models.documents import Documents, PackedBatch


def find_base(model: Any) -> nn.Module:
    """The decoder whose `last_hidden_state` is after the final norm. Looks through PEFT's wrapper.

    Llama 4's `get_decoder()` returns the causal LM itself, so the class's own prefix is tried where that happens.
    """
    from transformers import PreTrainedModel

    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = causal.get_decoder()
    if base is causal or not isinstance(base, PreTrainedModel):
        base = getattr(causal, causal.base_model_prefix, None) or getattr(causal, "model", None)
    if base is causal or not isinstance(base, PreTrainedModel):
        raise Refused(
            type(causal).__name__,
            "its decoder cannot be told from its head",
            wanted="a decoder-only model of transformers",
        )
    return base


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers: the longest ModuleList directly below the base model."""
    base = find_base(model)
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise Refused(
            type(base).__name__, "it has no list of decoder layers", wanted="a decoder-only model of transformers"
        )
    return max(lists, key=len)


class Backbone:
    """Calls the base model with everything that keeps documents apart, and counts that it was used.

    Not an nn.Module: it holds the model without owning it, so that parameter names do not change.
    """

    def __init__(self, model: Any, state: AttentionState, *, router_logits: bool = False, isolate: bool = True):
        self.base = find_base(model)
        self.state = state
        self._router_logits = router_logits
        self._isolate = isolate
        self._checked = False
        self._dispatches = model.config._attn_implementation == NAME
        parameters = inspect.signature(self.base.forward).parameters.values()
        self._takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}

    def __call__(self, batch: PackedBatch) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """(hidden [T, D] after the final norm, router logits [T, E] of each MoE layer or None)."""
        if not self._isolate and len(batch.pack_tokens) > 1:
            raise Refused(
                type(self.base).__name__,
                f"{len(batch.pack_tokens)} documents in one row of a model that mixes them",
                do="set train.micro_batch = 1",
            )
        kwargs = attention_kwargs(batch, isolate=self._isolate)
        if self._router_logits:
            kwargs["output_router_logits"] = True
        if self._takes is not None and not self._isolate:
            kwargs = {k: v for k, v in kwargs.items() if k in self._takes}
        before = self.state.calls
        with self.state.bound(Documents.of(batch)) if self._dispatches else nullcontext():
            output = self.base(input_ids=batch.input_ids, **kwargs)
        if self._isolate and not self._checked:
            self._check_calls(self.state.calls - before)
        hidden = output.last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1]), getattr(output, "router_logits", None)

    def _check_calls(self, calls: int) -> None:
        if calls == 0:
            raise Refused(
                type(self.base).__name__,
                "rft's attention was never called in a forward: this model does not use the attention registry",
                do='set data.packing = "none"',
            )
        self._checked = True
