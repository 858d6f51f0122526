"""Attention as a registered op is attention: outputs and gradients bit by bit, whatever lies where in memory; nothing is left behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rft.models import attention_opaque
from rft.models.attention import AttentionState, attending
from rft.models.attention_backends import BACKENDS, Inputs
from rft.models.attention_opaque import handed_over, opaque_attention
from rft.models.documents import DocumentMask, Documents

LENGTHS = (9, 1, 14)
T, H, KV, E = sum(LENGTHS), 4, 2, 8


def inputs(layout: str) -> list[Tensor]:
    """q, k, v [1, H, T, E]: of their own memory token by token, head by head, or slices of one projection."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.randn(1, T, (H + 2 * KV) * E, generator=generator)
    parts = [p.unflatten(-1, (-1, E)).transpose(1, 2) for p in joint.split([H * E, KV * E, KV * E], -1)]
    if layout == "joint":
        return parts
    return [p.contiguous() if layout == "heads" else p.transpose(1, 2).contiguous().transpose(1, 2) for p in parts]


CASES = [
    pytest.param("sdpa", None, None, False, id="sdpa"),
    pytest.param("sdpa", 4, None, False, id="window"),
    pytest.param("math", 4, 5.0, True, id="soft-cap, sinks"),
]


@pytest.mark.parametrize("layout", ["tokens", "heads", "joint"])
@pytest.mark.parametrize(("backend", "window", "softcap", "sinks"), CASES)
def test_output_and_gradients(backend: str, window: int | None, softcap: float | None, sinks: bool, layout: str):
    mask = DocumentMask(Documents.from_lengths(LENGTHS))
    slope = torch.randn(1, T, H, E, generator=torch.Generator().manual_seed(1))
    found = []
    for opaque in (False, True):
        q, k, v = (t.detach().requires_grad_() for t in inputs(layout))
        sink = torch.linspace(-1, 1, H).requires_grad_() if sinks else None
        if opaque:
            with handed_over(attending("layer", AttentionState(backend), mask)):
                given = {"scale": 0.3, "dropout": 0.0, "softcap": softcap, "window": window}
                out = opaque_attention(q, k, v, sink, **given)  # type: ignore[arg-type]
            assert len(attention_opaque._calls) == 1
        else:
            call = BACKENDS[backend](Inputs(q, k, v, 0.3, 0.0, softcap, sink), mask.documents, window)
            out = call.transpose(1, 2).contiguous()
        leaves = [t for t in (q, k, v, sink) if t is not None]
        first = torch.autograd.grad(out, leaves, slope, retain_graph=True)
        second = torch.autograd.grad(out, leaves, slope)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), (
            "a graph that was kept goes back again"
        )
        found.append([out.detach(), *first])
        del out, q, k, v, leaves
    for plain, own in zip(*found, strict=True):
        assert torch.equal(own, plain)
    gc.collect()
    assert not attention_opaque._calls


def test_a_graph_goes_with_what_was_saved_for_it():
    mask = DocumentMask(Documents.from_lengths(LENGTHS))
    q, k, v = (t.requires_grad_() for t in inputs("tokens"))
    with handed_over(attending("layer", AttentionState("sdpa"), mask)):
        given = {"scale": 0.3, "dropout": 0.0, "softcap": None, "window": None}
        out = opaque_attention(q, k, v, None, **given) * 2  # type: ignore[arg-type]
        assert len(attention_opaque._calls) == 1
        del out
        assert not attention_opaque._calls
        with torch.no_grad():
            opaque_attention(q, k, v, None, **given)  # type: ignore[arg-type]
    assert not attention_opaque._calls


@pytest.mark.parametrize("layout", ["tokens", "heads"])
def test_a_graph_holds_neither_inputs_nor_output(layout: str):
    """Their memory is that of compiled code, which uses it again."""
    documents = Documents.from_lengths(LENGTHS)

    def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        return BACKENDS["sdpa"](Inputs(query, key, value, 0.3), documents, None).transpose(1, 2).contiguous()

    tensors = inputs(layout)
    call = attention_opaque._Call(attention_opaque._same, attention_opaque._same)
    with torch.enable_grad():
        tensors.append(call.forward(run, (*tensors, None)))
    memory = [StorageWeakRef(t.untyped_storage()) for t in tensors]
    tensors.clear()
    assert [ref.expired() for ref in memory] == [True] * 4


def test_as_torch_checks_ops():
    mask = DocumentMask(Documents.from_lengths(LENGTHS))
    q, k, v = (t.requires_grad_() for t in inputs("tokens"))
    with handed_over(attending("layer", AttentionState("sdpa"), mask)):
        torch.library.opcheck(
            attention_opaque._attention,
            (q, k, v, None, 0.3, 0.0, None, None, True),
            test_utils=("test_autograd_registration", "test_faketensor"),
        )
