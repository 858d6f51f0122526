"""What this GPU does, measured in some ten seconds: the figures behind the planner's times.

Products at the shapes of an 8B layer, attention forward and backward, a pass over memory, copies to pinned memory, and the launching of one
decoder layer. Every figure is what a training step reaches, not a peak: a GPU at work is held at its power limit, and one call on a cool GPU is
not (745 TFLOP/s on an H200, 640 to 690 in a step). So each kind of work goes on for half a second without a pause, and its later half counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Seconds = Callable[[Callable[[], Any]], float]
"""Of one call of what it is given."""
LAUNCHES = 7
"""Repetitions of what is launched and waited for."""
SUSTAINED = 0.5
"""Seconds without a pause of each kind of work."""
SLICES = 10
"""Of that time, each with a figure of its own; the median of the later half is taken."""


def calibrate(device: torch.device, tokens: int = 16384, sustained: float = SUSTAINED) -> Iterator[tuple[str, float]]:
    """(name of a field of `devices.Rates`, figure) one after the other. tokens, sustained: less of them makes it shorter, and less true."""

    def seconds(run: Callable[[], Any]) -> float:
        return sustained_seconds(run, device, sustained)

    half = torch.bfloat16
    yield "matmul", _matmul(tokens, 4096, 14336, half, device, seconds)
    yield "fp32", _matmul(max(256, tokens // 8), 4096, 4096, torch.float32, device, seconds)
    fp8 = _fp8(tokens, device, seconds)
    if fp8 is not None:
        yield "fp8", fp8
    fastest, plain = _attention(tokens, device, seconds)
    if plain is not None:
        yield "attention_plain", plain
    if fastest is not None:
        yield "attention", fastest
    yield "memory", _memory(tokens, device, seconds)
    yield "host", _host(device, seconds)
    if device.type == "cuda":
        yield "launch", _launch(device, packed=False)
        yield "launch_packed", _launch(device, packed=True)
        free, total = torch.cuda.mem_get_info(device)
        beside = total - free - torch.cuda.memory_reserved(device)
        if 0 < beside < 4 << 30:  # more: somebody else is on it too
            yield "context", float(beside)


def sustained_seconds(run: Callable[[], Any], device: torch.device, sustained: float) -> float:
    """Seconds of one call among calls that follow each other for about `sustained` seconds, by the device's own clock.

    Without a wait between them: a pass over memory takes 63 us on an H200 and its launch with a wait 16 more, which made 3.40 TB/s of 4.26.
    """
    for _ in range(2):  # compiled, chosen, allocated
        run()
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    calls = max(1, round(sustained / SLICES / max(1e-6, time.perf_counter() - began)))
    marks = [_mark(device)]
    for _ in range(SLICES):
        for _ in range(calls):
            run()
        marks.append(_mark(device))
    _wait(device)
    slices = [_between(a, b) / calls for a, b in itertools.pairwise(marks)]
    return statistics.median(slices[SLICES // 2 :])


def _mark(device: torch.device) -> Any:
    """A moment of the device: when it gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    """Seconds between two moments."""
    return end - begin if isinstance(begin, float) else 1e-3 * begin.elapsed_time(end)


def _launched_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median of one call that is waited for, behind two that are not counted."""
    times = []
    for i in range(LAUNCHES + 2):
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


def _matmul(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device, seconds: Seconds) -> float:
    x = torch.randn(rows, inner, device=device, dtype=dtype)
    weight = torch.randn(columns, inner, device=device, dtype=dtype)
    return 2 * rows * inner * columns / seconds(lambda: x @ weight.t())


def _fp8(rows: int, device: torch.device, seconds: Seconds) -> float | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    from rft.kernels import fp8

    x, scale = fp8.quantise_rows(torch.randn(rows, 4096, device=device, dtype=torch.bfloat16))
    weight, weight_scale = fp8.quantise_rows(torch.randn(14336, 4096, device=device, dtype=torch.bfloat16))

    def run() -> Tensor:
        return torch._scaled_mm(
            x, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * rows * 4096 * 14336 / seconds(run)


def _attention(tokens: int, device: torch.device, seconds: Seconds) -> tuple[float | None, float | None]:
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

        found[name] = 3.5 * 2 * 32 * 128 * length * length / seconds(run)
    return max(found.values(), default=None), found.get("varlen")


def _memory(tokens: int, device: torch.device, seconds: Seconds) -> float:
    x = torch.randn(max(1, tokens // 4), 16384, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: torch.add(x, 1.0, out=y))


def _host(device: torch.device, seconds: Seconds) -> float:
    size = 256 << 20 if device.type == "cuda" else 16 << 20
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds(lambda: pinned.copy_(there, non_blocking=True))


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

    return _launched_seconds(run, device) / len(layers)
