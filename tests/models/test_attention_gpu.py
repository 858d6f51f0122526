"""Attention, norms and the loss head on a CUDA device: varlen against plain maths, no document sees another, no wait for the device."""

from __future__ import annotations

import pytest
import torch

from rft.config.model import ModelConfig
from rft.models import attention_backends as backends
from rft.models import attention_fast as fast
from rft.models.attention import Documents, Needs, choose_backend, install_attention, register
from rft.models.backbone import Backbone
from rft.models.head import Head
from rft.models.load import build_meta, find_model, materialise
from rft.models.probe import probe_config
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.close import assert_no_worse
from support.families import FAMILIES, build
from support.rows import packed_batch, random_documents
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTHS = (300, 1, 64, 1000, 131)


def _inputs(heads: int, kv_heads: int, size: int, value_size: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    return [torch.randn(1, h, sum(LENGTHS), e, generator=generator).to(CUDA) for h, e in shapes]


def _run(backend, tensors, window, dtype, scale=0.3):
    leaves = [t.detach().to(dtype, copy=True).requires_grad_(True) for t in tensors]  # the caller's stay as they are
    out = backend(backends.Inputs(*leaves, scale), Documents.from_lengths(LENGTHS, CUDA), window)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(CUDA, dtype)
    out.backward(slope)
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "value_size"), [(4, 4, 64, 64), (8, 2, 128, 128), (4, 4, 192, 128), (8, 1, 256, 256)]
)
def test_varlen_is_as_close_to_plain_maths_in_fp32_as_sdpa_is(heads, kv_heads, size, value_size, window):
    tensors = [t.bfloat16().float() for t in _inputs(heads, kv_heads, size, value_size)]
    truth = _run(backends.math, tensors, window, torch.float32)
    plain = _run(backends.sdpa, tensors, window, torch.bfloat16)
    got = _run(backends.varlen, tensors, window, torch.bfloat16)
    for own, theirs, exact in zip(got, plain, truth, strict=True):
        assert_no_worse(own, theirs, exact, factor=3.0)  # two kernels, other orders of summation


@pytest.mark.parametrize("window", [None, 100])
def test_sdpa_and_plain_maths_agree_in_fp32(window):
    tensors = _inputs(8, 2, 64, 64)
    for own, exact in zip(
        _run(backends.sdpa, tensors, window, torch.float32),
        _run(backends.math, tensors, window, torch.float32),
        strict=True,
    ):
        assert (own - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.mark.parametrize("backend", ["varlen", "sdpa", "math"])
def test_editing_one_document_leaves_the_others_bit_equal(backend):
    register()
    model = build("llama", attention="rft").to(CUDA, torch.bfloat16)
    state = install_attention(model, backend)
    a, b = random_documents(40, 33)
    edited = a.clone()
    edited[37] = 99 if edited[37] != 99 else 98
    with torch.no_grad():
        before, after = (Backbone(model, state)(packed_batch(x, b).to(CUDA))[0] for x in (a, edited))
    assert torch.equal(before[40:], after[40:])
    assert not torch.equal(before[37:40], after[37:40])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gemma2", "gpt_oss", "gpt_neox")])
def test_packed_families_through_varlen_equal_fp32_maths_up_to_bf16(family):
    probed = probe_config(FAMILIES[family](), CUDA)
    if not probed.isolates:
        pytest.skip(f"not packed here: {probed.reason[:80]}")
    name, _ = choose_backend("auto", CUDA, torch.bfloat16, probed.needs)
    assert name in ("fa4", "cudnn", "varlen")
    register()
    model = build(family, attention="rft").to(CUDA, torch.bfloat16)
    batch = packed_batch(*random_documents(40, 21, 9), fill=3).to(CUDA)
    hidden = {}
    with torch.no_grad():
        for backend in ("varlen", "math", "sdpa"):
            hidden[backend] = Backbone(model, install_attention(model, backend))(batch)[0].float()
    error = (hidden["varlen"] - hidden["math"]).norm() / hidden["math"].norm()
    # the scale of rounding in this model, routers' flips included: what another exact backend differs by
    other = (hidden["sdpa"] - hidden["math"]).norm() / hidden["math"].norm()
    assert error <= 3 * other + 1e-2


@pytest.mark.parametrize("name", ["fa4", "cudnn", "flex"])
@pytest.mark.parametrize("needs", [{}, {"window": True}, {"softcap": True}, {"sinks": True}], ids=str)
def test_a_fast_backend_is_proved_on_this_gpu_or_says_why_not(name, needs):
    made = Needs(**needs, head_size=128, value_size=128)
    if why := fast.why_not(name, CUDA, torch.bfloat16, made):
        pytest.skip(why)
    error, why = fast.proof(name, CUDA, torch.bfloat16, (made.softcap, made.sinks, made.window, 128, 128))
    assert why is None, why
    assert error < fast.ALLOWED


def test_soft_cap_and_sinks_are_served_by_more_than_plain_maths():
    needs = Needs(softcap=True, head_size=64, value_size=64)
    assert choose_backend("auto", CUDA, torch.bfloat16, needs)[0] in ("fa4", "flex")
    for family in ("gemma2", "gpt_oss"):
        assert probe_config(FAMILIES[family](), CUDA).isolates


def test_deterministic_mode_gives_bit_equal_gradients_through_varlen():
    tensors = _inputs(8, 2, 128, 128)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (_run(backends.varlen, tensors, None, torch.bfloat16) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_forward_and_backward_of_a_batch_never_wait_for_the_device(tmp_path):
    tiny_llama(tmp_path)
    cfg = ModelConfig(path=str(tmp_path))
    source = find_model(cfg)
    model = build_meta(source, cfg, torch.bfloat16)
    receipts = Receipts()
    apply_swaps(model, receipts, device=CUDA)
    assert receipts.applied[0].count == 5
    state = install_attention(model, "varlen")
    materialise(model, source, CUDA)
    backbone, head = Backbone(model, state), Head(model, chunk_rows=16)

    def step(batch):
        hidden, _ = backbone(batch)
        total = head.loss_sums(hidden, batch.labels, num_label_tokens=batch.num_label_tokens)["next_token"]
        total.backward()

    batch = packed_batch(*random_documents(40, 21)).to(CUDA)
    step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_long_document_through_plain_maths_keeps_one_documents_scores():
    """16 heads, 4,096 tokens: 1 GiB of fp32 scores a document, computed again in the backward."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, 16, 8192, 64, generator=generator).to(CUDA, torch.bfloat16).requires_grad_(True)
        for _ in range(3)
    ]
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    inputs = backends.Inputs(*tensors, 0.125, softcap=30.0)
    out = backends.math(inputs, Documents.from_lengths((4096, 4096), CUDA), None)
    kept = torch.cuda.memory_allocated() - base
    assert kept < 300 << 20
    out.sum().backward()
    assert all(t.grad is not None for t in tensors)
