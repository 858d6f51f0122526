"""What this GPU does, measured in half a minute: the figures behind the planner's times.

Products at the shapes of an 8B layer, attention forward and backward, a pass over memory, copies to pinned memory, and the launching of one
decoder layer. Medians of a few repetitions; every figure is what a training step reaches, not a peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

REPEATS = 7


def calibrate(device: torch.device, tokens: int = 16384) -> Iterator[tuple[str, float]]:
    """(name of a field of `devices.Rates`, figure) one after the other. tokens: fewer make it shorter, and less true."""
    half = torch.bfloat16
    yield "matmul", _matmul(tokens, 4096, 14336, half, device)
    yield "fp32", _matmul(max(256, tokens // 8), 4096, 4096, torch.float32, device)
    fp8 = _fp8(tokens, device)
    if fp8 is not None:
        yield "fp8", fp8
    fastest, plain = _attention(tokens, device)
    if plain is not None:
        yield "attention_plain", plain
    if fastest is not None:
        yield "attention", fastest
    yield "memory", _memory(tokens, device)
    yield "host", _host(device)
    if device.type == "cuda":
        yield "launch", _launch(device, packed=False)
        yield "launch_packed", _launch(device, packed=True)
        free, total = torch.cuda.mem_get_info(device)
        beside = total - free - torch.cuda.memory_reserved(device)
        if 0 < beside < 4 << 30:  # more: somebody else is on it too
            yield "context", float(beside)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median of one call, behind two that are not counted."""
    times = []
    for i in range(REPEATS + 2):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        if i >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> float:
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(columns, inner, device=device, dtype=dtype)
    return 2 * rows * inner * columns / _seconds(lambda: x @ weight.t(), device)


def _fp8(rows: int, device: torch.device) -> float | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    from rft.kernels import fp8

    x, scale = fp8.quantise_rows(torch.randn(rows, 4096, device=device, dtype=torch.bfloat16))
    weight, weight_scale = fp8.quantise_rows(torch.randn(14336, 4096, device=device, dtype=torch.bfloat16))

    def run() -> Tensor:
        return torch._scaled_mm(
            x, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * rows * 4096 * 14336 / _seconds(run, device)


def _attention(tokens: int, device: torch.device) -> tuple[float | None, float | None]:
    """FLOP/s forward and backward of one long document, 32 heads of 128: (the fastest backend here, varlen_attn)."""
    from rft.models import attention_backends, attention_fast
    from rft.models.attention import why_not_backend
    from rft.models.documents import Documents, Needs

    length = min(tokens, 16384)
    found: dict[str, float] = {}
    for name in ("fa4", "cudnn", "varlen") if device.type == "cuda" else ():
        if why_not_backend(name, device, torch.bfloat16, Needs(head_size=128, value_size=128)):
            continue
        q = torch.randn(1, 32, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(1, 8, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        )
        documents = Documents.from_lengths((length,), device)
        inputs = attention_backends.Inputs(q, k, v, 128**-0.5, 0.0, None, None)
        call: Any = attention_backends.BACKENDS.get(name) or attention_fast.BACKENDS[name]

        def run(call=call, inputs=inputs, documents=documents) -> None:
            out = call(inputs, documents, None)
            out.backward(torch.ones_like(out))

        found[name] = 3.5 * 2 * 32 * 128 * length * length / _seconds(run, device)
    return max(found.values(), default=None), found.get("varlen")


def _memory(tokens: int, device: torch.device) -> float:
    x = torch.randn(max(1, tokens // 4), 16384, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.nbytes / _seconds(lambda: torch.add(x, 1.0, out=y), device)


def _host(device: torch.device) -> float:
    size = 256 << 20 if device.type == "cuda" else 16 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _seconds(lambda: pinned.copy_(there, non_blocking=True), device)


def _launch(device: torch.device, *, packed: bool) -> float:
    """Seconds of the host for one decoder layer, forward and backward, with so few tokens that the device is never what is waited for.
    packed: over NF4."""
    import transformers

    from rft.adapters.lora import inject
    from rft.config.adapter import LoraConfig
    from rft.models.attention import choose_backend, install_attention, register
    from rft.models.backbone import decoder_layers, find_base
    from rft.models.documents import DocumentMask, Documents, Needs
    from rft.models.receipts import Receipts
    from rft.models.surgery import apply_swaps
    from rft.quant.packed import place

    register()
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=64, vocab_size=128
    )  # fmt: skip
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="rft", dtype=torch.bfloat16
        )
    model = inject(model, LoraConfig(r=8), dtype=torch.bfloat16).to(device)
    apply_swaps(model, Receipts(), device=device, kernels=True)
    install_attention(model, choose_backend("auto", device, torch.bfloat16, Needs(head_size=64, value_size=64))[0])
    rotary: Any = find_base(model).rotary_emb
    if packed:
        weights = {
            name: m.weight.data
            for name, m in model.named_modules()
            if isinstance(m, torch.nn.Linear) and m.in_features > 8
        }
        for name, container in place(model, list(decoder_layers(model)), "nf4").linears.items():
            container.to_empty(device=device)
            container.fill(weights[name])
    x = torch.randn(1, 128, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(128, device=device)[None]
    tables = rotary(x, positions)
    mask: Any = DocumentMask(Documents.from_lengths((128,), device))
    layers = list(decoder_layers(model.train()))

    def run() -> None:
        hidden = x
        for layer in layers:
            out = layer(
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=tables, use_cache=False
            )
            hidden = out[0] if isinstance(out, tuple) else out
        hidden.float().sum().backward()

    return _seconds(run, device) / len(layers)
