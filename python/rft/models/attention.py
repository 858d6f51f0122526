"""The attention that `transformers` calls under the name "rft": documents of a packed row never see each other.

The batch's documents travel as the attention mask: our mask function returns a descriptor instead of a tensor, which
reaches every attention layer and is held by its checkpoint, so recomputation sees the same batch. A layer that gets no
mask falls back to the state that its module carries. Shapes: B batch, H heads, T tokens, E head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft.errors import Refused
from rft.models import attention_backends as backends
from rft.models import attention_fast as fast
from rft.models.attention_kept import keep
from rft.models.attention_opaque import Attend, Run, opaque_attention
from rft.models.documents import DocumentMask, Documents, Needs, PackedBatch

NAME = "rft"

# Arguments of the attention function that change nothing in what it computes. Any other one that is not None is refused.
_INERT = {
    "position_ids", "use_cache", "cache_position", "past_key_values", "past_key_value", "cache",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "position_embeddings", "logits_to_keep",
    "num_items_in_batch", "layer_idx", "head_mask",
}  # fmt: skip

_current = threading.local()


@dataclass
class AttentionState:
    """What the attention layers of one model share: the backend, the documents at hand, and the count of calls."""

    backend: str
    calls: int = 0
    documents: Documents | None = None
    """Of the running or last forward: for layers that no mask reaches, also while they are computed again in the backward."""
    needs: Needs = field(default_factory=Needs)

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionState:
        return self

    @contextmanager
    def bound(self, documents: Documents) -> Iterator[None]:
        """Inside, the model's forward is over these documents. They stay in `documents` afterwards, for the backward."""
        outer = getattr(_current, "documents", None)
        self.documents = _current.documents = documents
        try:
            yield
        finally:
            _current.documents = outer


class CallConstants(NamedTuple):
    """What a layer hands to its attention beside the tensors of the batch."""

    scaling: float | None
    dropout: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None


@contextmanager
def recorded() -> Iterator[list[CallConstants]]:
    """Inside, every call of `attention` on this thread leaves what it was given."""
    outer = getattr(_current, "recorder", None)
    calls: list[CallConstants] = []
    _current.recorder = calls
    try:
        yield calls
    finally:
        _current.recorder = outer


def register() -> None:
    """Make "rft" known to `transformers`' registries. Doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, describe_mask)


def install_attention(model: Any, backend: str) -> AttentionState:
    """Give every module of the model the state that `attention` reads, and return it."""
    state = AttentionState(backend)
    for module in model.modules():
        module.__dict__["rft_attention"] = state
    return state


def attention_kwargs(batch: PackedBatch, *, isolate: bool = True) -> dict[str, Any]:
    """Keyword arguments of a base model's forward beside input_ids, so that no kind of layer mixes documents.

    Both `cu_seq_lens_*` and `seq_idx` are always given: attention and DeltaNet layers read the first, Mamba and
    convolution layers the second, and transformers refuses them where it cannot honour them. Without `isolate` the row
    is one document (and its fill-up, which nothing reads), and only positions are given.
    """
    if not isolate:
        return {"position_ids": batch.position_ids, "use_cache": False}
    return {
        # All true: without a mask transformers looks for borders in position_ids, and the host waits for the device there.
        "attention_mask": torch.ones_like(batch.input_ids, dtype=torch.bool),
        "position_ids": batch.position_ids,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_length,
        "max_length_k": batch.max_length,
        "seq_idx": batch.seq_idx,
        "use_cache": False,
    }


def describe_mask(*, config: Any = None, local_size: int | None = None, **kwargs: Any) -> Any:
    """Registered mask function: a `DocumentMask` inside a bound forward, else the dense mask that `transformers` makes."""
    documents = getattr(_current, "documents", None)
    if documents is None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        if local_size is not None:
            kwargs["local_size"] = local_size
        return ALL_MASK_ATTENTION_FUNCTIONS["eager"](config=config, **kwargs)
    if local_size is None:
        return DocumentMask(documents)
    # local_size does not say which of the two it is; the config has both numbers (Llama 4 is the only chunked family)
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk == local_size and getattr(config, "sliding_window", None) != local_size:
        return DocumentMask(documents, chunk=local_size)
    return DocumentMask(documents, window=local_size)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered attention function. query [B, H, T, E], key and value [B, Hkv, T, E or Ev]; returns ([B, T, H, Ev], None).

    Raises Refused for an argument that it does not know, and for a mask that the model made itself.
    """
    unknown = sorted(k for k, v in kwargs.items() if k not in _INERT and v is not None)
    if unknown:
        raise Refused(
            type(module).__name__,
            f"its attention takes {', '.join(unknown)}, which rft does not implement",
            wanted="causal attention with windows, chunks, soft-cap or sinks",
        )
    if is_causal is False:
        raise Refused(type(module).__name__, "its attention is not causal", wanted="a decoder")
    if torch.compiler.is_compiling():  # the documents, and whose they are, are found when the op runs
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        query, key, value = _compute_type(query, key, value)
        dropout = dropout if module.training else 0.0
        out = opaque_attention(
            query, key, value, s_aux, scale=scale, dropout=dropout, softcap=softcap, window=sliding_window
        )
        return out, None
    state: AttentionState | None = module.__dict__.get("rft_attention")
    recorder: list | None = getattr(_current, "recorder", None)
    if recorder is not None:
        recorder.append(CallConstants(scaling, dropout, sliding_window, softcap, s_aux))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = _compute_type(query, key, value)
    inputs = backends.Inputs(query, key, value, scale, dropout if module.training else 0.0, softcap, s_aux)
    mask = _mask_of(module, state, attention_mask)
    if not isinstance(mask, DocumentMask):
        return backends.dense(inputs, mask).transpose(1, 2).contiguous(), None
    call = _prepared(type(module).__name__, state, inputs, mask, sliding_window)
    if why_not_kept(_backend_of(state), inputs.dropout):
        out = call(inputs)
    else:
        out = keep(lambda: call(inputs), (inputs.query, inputs.key, inputs.value))
    return out.transpose(1, 2).contiguous(), None  # models view it as [1, T, hidden]


def _backend_of(state: AttentionState | None) -> str:
    return state.backend if state is not None else "math"


def _prepared(
    name: str, state: AttentionState | None, inputs: backends.Inputs, mask: DocumentMask, sliding_window: int | None
) -> Callable[[backends.Inputs], Tensor]:
    """The backend over the mask's documents, once the call was found to be one that it can serve. name: of the module, for errors."""
    query = inputs.query
    if query.shape[0] != 1:
        raise Refused(name, f"got {query.shape[0]} rows in one batch", wanted="one packed row")
    windows = [w for w in (sliding_window, mask.window) if w is not None]
    window = min(windows) if windows else None
    if state is not None:
        state.calls += 1
        _note(state.needs, inputs, window, mask.chunk)
    documents = mask.documents if mask.chunk is None else mask.documents.chunked(mask.chunk)
    if documents.tokens != query.shape[2]:
        raise Refused(
            name,
            f"got {query.shape[2]} tokens for documents of {documents.tokens}",
            wanted="the whole packed row in each layer",
        )
    backend = _backend_of(state)
    call = backends.BACKENDS.get(backend) or fast.BACKENDS[backend]
    return lambda inputs: call(inputs, documents, window)


def attending(name: str, state: AttentionState | None, mask: DocumentMask) -> Attend:
    """What `attention_opaque.handed_over` takes: attention over the mask's documents. name: of the layer, for errors."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, dropout: float, softcap: float | None,
        window: int | None,
    ) -> tuple[Run, bool]:  # fmt: skip
        call = _prepared(name, state, backends.Inputs(query, key, value, scale, dropout, softcap, sinks), mask, window)

        def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            inputs = backends.Inputs(query, key, value, scale, dropout, softcap, sinks)
            return call(inputs).transpose(1, 2).contiguous()

        return run, why_not_kept(_backend_of(state), dropout) is None

    return attend


def why_not_kept(backend: str, dropout: float) -> str | None:
    """Why a layer that is computed again has to compute its attention again too, or None."""
    if backend == "math":
        return "math keeps scores, tokens by tokens, and no output alone"
    return f"attention dropout of {dropout:g} draws random numbers" if dropout else None


def _mask_of(module: nn.Module, state: AttentionState | None, mask: Any) -> Any:
    """The descriptor that came as the mask; without one, the documents that the module's state holds in a bound forward."""
    if isinstance(mask, DocumentMask):
        return mask
    documents = getattr(_current, "documents", None)
    if documents is None and mask is None and state is not None and torch.is_grad_enabled():
        documents = state.documents  # computed again in the backward, on autograd's own thread
    if documents is None:
        return mask
    if mask is not None:
        raise Refused(
            type(module).__name__,
            "this model builds its own attention mask, which could let documents see each other",
            do='set data.packing = "none"',
        )
    return DocumentMask(documents)


def _compute_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, rotary embeddings leave q and k in fp32 beside a bf16 v: bring them together."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(t.to(dtype) for t in tensors)
    return tensors


def _note(needs: Needs, inputs: backends.Inputs, window: int | None, chunk: int | None) -> None:
    needs.softcap |= inputs.softcap is not None
    needs.sinks |= inputs.sinks is not None
    needs.window |= window is not None
    needs.chunk |= chunk is not None
    needs.dropout = max(needs.dropout, inputs.dropout)
    needs.head_size = max(needs.head_size, inputs.query.shape[-1])
    needs.value_size = max(needs.value_size, inputs.value.shape[-1])


ORDER = ("fa4", "cudnn", "varlen", "flex", "sdpa", "math")
"""Fastest first."""


def choose_backend(
    requested: str, device: torch.device, dtype: torch.dtype, needs: Needs, *, first: tuple[str, ...] = ()
) -> tuple[str, str]:
    """(backend, reason) for `model.attention`. dtype: type of the computation. Raises Refused where a named one cannot serve.

    first: what "auto" asks before all others.

    FA4, cuDNN and FlexAttention are run once on this device beside plain maths before they are taken.
    """
    if requested != "auto":
        if why := why_not_backend(requested, device, dtype, needs):
            serving = next(n for n in ORDER if why_not_backend(n, device, dtype, needs) is None)
            raise Refused(f'model.attention = "{requested}"', why, do=f'set model.attention = "{serving}" or "auto"')
        return requested, "set in the config"
    refusals: dict[str, str] = {}
    for name in dict.fromkeys((*first, *ORDER)):
        why = why_not_backend(name, device, dtype, needs)
        if why is None:
            break
        refusals[name] = why
    skipped = "; ".join(f"{n}: {w}" for n, w in refusals.items())
    return name, f"serves {needs.summary()} here" + (f" ({skipped})" if skipped else "")


def why_not_backend(name: str, device: torch.device, dtype: torch.dtype, needs: Needs) -> str | None:
    """Why a backend cannot serve this model on this device, or None."""
    if name not in fast.BACKENDS:
        return _why_not(name, device, dtype, needs)
    if why := fast.why_not(name, device, dtype, needs):
        return why
    key = (needs.softcap, needs.sinks, needs.window, needs.head_size, needs.value_size)
    return fast.proof(name, device, dtype, key)[1]


def _why_not(name: str, device: torch.device, dtype: torch.dtype, needs: Needs) -> str | None:
    if name == "math":
        return None
    if needs.softcap or needs.sinks:
        return f"{name} has no {'soft-cap' if needs.softcap else 'sinks'}, which this model uses"
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return "varlen needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen has no {str(dtype).removeprefix('torch.')}"
    if needs.dropout:
        return f"varlen has no attention dropout, which this model's config sets to {needs.dropout}"
    size = max(needs.head_size, needs.value_size)
    if size > 256 or size % 8:
        return f"varlen takes head sizes up to 256 in multiples of 8, this model has {size}"
    if needs.window and not backends.varlen_has_windows():
        return "varlen of this torch has no sliding window"
    return None
