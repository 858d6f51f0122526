"""FA4, cuDNN and FlexAttention as far as a CPU can show: block masks, what is handed over, what is refused and why."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rft.errors import Refused
from rft.models import attention_fast as fast
from rft.models.attention import Documents, Needs, choose_backend
from rft.models.attention_backends import Inputs, math
from support.close import assert_close

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = (300, 1, 130, 64)


def tensors(size: int = 16, lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, sum(lengths), size, generator=generator) for h in (4, 2, 2)]


def dense_mask(lengths, window) -> np.ndarray:
    total = sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    q, k = np.arange(total)[:, None], np.arange(total)[None, :]
    seen = (document[:, None] == document[None, :]) & (k <= q)
    return seen if window is None else seen & (q - k < window)


@pytest.mark.parametrize("window", [None, 1, 40, 128, 200])
@pytest.mark.parametrize("lengths", [LENGTHS, (512,), (1,) * 300, (129, 255, 128)], ids=str)
def test_blocks_are_those_in_which_something_or_everything_is_seen(lengths, window):
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    partial, full = fast.visible_blocks(starts, window)
    mask = dense_mask(lengths, window)
    number = len(partial)
    padded = np.zeros((number * 128, number * 128), bool)
    padded[: len(mask), : len(mask)] = mask
    blocks = padded.reshape(number, 128, number, 128).transpose(0, 2, 1, 3)
    some, whole = blocks.any((2, 3)), blocks.all((2, 3))
    assert not (some & ~(partial | full)).any()  # nothing that is seen is left out
    assert not (full & ~whole).any()  # what is taken without a look is seen whole
    assert (partial | full).sum() <= some.sum() + number  # and hardly a block is looked at for nothing


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"softcap": 5.0}, {"sinks": True}, {"window": 40, "softcap": 5.0, "sinks": True}],
    ids=str,
)
def test_flex_gives_what_plain_maths_gives(monkeypatch, options):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(fast, "_flex_call", lambda: flex_attention)  # compiled on a GPU
    q, k, v = tensors()
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2)) if options.get("sinks") else None
    given = Inputs(q, k, v, 0.3, 0.0, options.get("softcap"), sinks)
    documents = Documents.from_lengths(LENGTHS)
    with torch.no_grad():
        out = fast.flex(given, documents, options.get("window"))
        assert_close(out, math(given, documents, options.get("window")), 1e-5)
    assert len([key for key in documents.made if key[0] == "block mask"]) == 1
    fast.flex(given, documents, options.get("window"))
    assert len(documents.made) == 1  # the second layer finds it made


def test_lengths_are_looked_through_once_a_batch_and_not_once_a_layer(monkeypatch):
    looked = []
    plain = fast._is_dense
    monkeypatch.setattr(fast, "_is_dense", lambda n: looked.append(n) or plain(n))
    monkeypatch.setattr(fast, "varlen", math)
    for lengths in ((9, 4, 7), (fast.LONG, 5)):
        q, k, v = tensors(lengths=lengths) if sum(lengths) < 100 else (None,) * 3
        documents = Documents.from_lengths(lengths)
        looked.clear()
        for _ in range(3):  # layers
            assert bool(fast._runs_of(documents)) == (fast.LONG in lengths)
            if q is not None:
                fast.cudnn(Inputs(q, k, v, 0.25), documents, None)
        assert 0 < len(looked) <= 2 * len(lengths)


def test_cudnn_takes_long_documents_each_and_runs_of_others_together(monkeypatch):
    monkeypatch.setattr(fast, "LONG", 50)
    monkeypatch.setattr(fast, "WHOLE", 10)
    calls = []

    def as_varlen(inputs, documents, window):
        calls.append(documents.lengths)
        return math(inputs, documents, window)

    def as_cudnn(q, k, v, scale, gqa):
        calls.append(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)

    monkeypatch.setattr(fast, "varlen", as_varlen)
    monkeypatch.setattr(fast, "_dense_cudnn", as_cudnn)
    lengths = (10, 20, 60, 50, 5, 51)  # 51 is long, and of a length that may never come again
    documents = Documents.from_lengths(lengths)
    given = Inputs(*tensors(lengths=lengths), 0.3)
    assert_close(fast.cudnn(given, documents, None), math(given, documents, None), 1e-5)
    assert calls == [(10, 20), 60, 50, (5, 51)]
    calls.clear()
    fast.cudnn(given, documents, 7)
    assert calls == [lengths]  # windows are varlen's
    torch.use_deterministic_algorithms(True)
    try:
        calls.clear()
        fast.cudnn(given, documents, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [lengths]


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_fa4_is_handed_borders_window_cap_sinks_and_scale(monkeypatch, returns_tuple):
    seen = {}

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, deterministic=False,
    ):  # fmt: skip
        seen.update(locals())
        inputs = Inputs(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), softmax_scale, 0.0, softcap or None, learnable_sink
        )
        lengths = tuple(cu_seqlens_q.diff().tolist())
        window = None if window_size[0] is None else window_size[0] + 1
        out = math(inputs, Documents.from_lengths(lengths), window)[0].transpose(0, 1)
        return (out, None) if returns_tuple else out

    package, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    fast._fa4_call.cache_clear()
    documents, sinks = Documents.from_lengths(LENGTHS), torch.randn(4)
    given = Inputs(*tensors(), 0.3, 0.0, 5.0, sinks)
    assert_close(fast.fa4(given, documents, 40), math(given, documents, 40), 1e-5)
    assert (seen["causal"], seen["window_size"], seen["max_seqlen_q"], seen["softcap"]) == (True, (39, 0), 300, 5.0)
    plain = Inputs(*tensors(), 0.3)
    assert_close(fast.fa4(plain, documents, None), math(plain, documents, None), 1e-5)
    fast._fa4_call.cache_clear()


def test_a_backend_that_fails_its_proof_is_not_taken_and_says_how_far_it_is_off(monkeypatch):
    fast.proof.cache_clear()
    monkeypatch.setitem(fast.BACKENDS, "flex", lambda inputs, documents, window: 1.1 * math(inputs, documents, window))
    error, why = fast.proof("flex", CPU, torch.float32, (False, False, False, 16, 16))
    assert error == pytest.approx(0.1, rel=1e-3)
    assert "differs from plain maths by 1.0e-01" in why
    fast.proof.cache_clear()

    def broken(*_):
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setitem(fast.BACKENDS, "flex", broken)
    assert "no kernel image" in fast.proof("flex", CPU, torch.float32, (False, False, False, 16, 16))[1]
    fast.proof.cache_clear()
    monkeypatch.setitem(fast.BACKENDS, "flex", lambda inputs, *_: math(inputs, *_).detach().requires_grad_())
    assert "no gradient" in fast.proof("flex", CPU, torch.float32, (False, False, False, 16, 16))[1]
    fast.proof.cache_clear()


def test_each_backend_is_refused_by_name_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    needs = Needs(head_size=128, value_size=128)
    for name in ("fa4", "cudnn", "flex"):
        assert "needs CUDA" in fast.why_not(name, CPU, torch.bfloat16, needs)
        assert "float32" in fast.why_not(name, CUDA, torch.float32, needs)
    assert "not installed" in fast.why_not("fa4", CUDA, torch.bfloat16, needs)
    assert fast.why_not("cudnn", CUDA, torch.bfloat16, needs) is None
    assert "soft-cap" in fast.why_not("cudnn", CUDA, torch.bfloat16, Needs(softcap=True, head_size=64, value_size=64))
    assert "head sizes" in fast.why_not("cudnn", CUDA, torch.bfloat16, Needs(head_size=192, value_size=128))
    assert (
        fast.why_not("flex", CUDA, torch.bfloat16, Needs(softcap=True, sinks=True, head_size=80, value_size=80)) is None
    )
    with pytest.raises(Refused, match=r"(?s)cudnn needs CUDA.*sdpa"):
        choose_backend("cudnn", CPU, torch.bfloat16, needs)
