"""What GPUs and the links between them really do: one table, and figures that `rft doctor --calibrate` measured on this machine.

Rates are what a training step reaches, not the vendor's peaks. Those of the H200 are measured (docs/performance.md); the others are the
vendor's figures times the shares that the H200 reaches of its own, so they are estimates until they are calibrated.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

GIB = 2**30


GUESSED_LAUNCH, GUESSED_PACKED_LAUNCH = 6.7e-3, 7.6e-3
"""An H200's host as `rft doctor --calibrate` measured it on 2026-12-01: 6.71 ms, and 7.60 over NF4. It was 5 to 9 from one moment to the next,
so these are guesses until a host is measured itself."""


@dataclass(frozen=True)
class Rates:
    """What one device does. FLOP/s and bytes/s."""

    matmul: float
    """bf16 products of a training step."""
    fp8: float
    """FP8 products; 0: none."""
    fp32: float
    attention: float
    """Forward and backward of long documents with the fastest backend there is for it (head size 128)."""
    attention_plain: float
    """The same with torch's varlen_attn, and whatever else is no faster."""
    memory: float
    """Elementwise passes."""
    host: float
    """Between the device and pinned host memory, each way."""
    launch: float = GUESSED_LAUNCH
    """Seconds of the host to launch one decoder layer forward and backward through the fused blocks."""
    launch_packed: float = GUESSED_PACKED_LAUNCH
    """The same over a base in NF4 or int8, whose weights are dequantised before each product."""
    context: int = 600 * 2**20
    """Bytes that a process takes beside torch's allocator: the CUDA context, libraries, compiled kernels."""
    source: str = "estimate"
    """Where the figures are from."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that can be planned for without having one."""

    name: str
    memory_bytes: int
    """As the driver reports it."""
    capability: tuple[int, int]
    rates: Rates
    within: float
    """Bytes/s of a collective between GPUs of one node, per GPU."""


# Shares of the vendor's figures that an H200 reaches: 702 of 989 TFLOP/s (bf16, 16384 x 4096 x 14336), 1,300 of 1,979 (FP8 by row), 4.26 of
# 4.8 TB/s, 560 of 989 (FA4, forward and backward) and 300 (varlen_attn, FlashAttention 2).
_MATMUL, _FP8, _MEMORY, _FA4, _FA2 = 0.71, 0.66, 0.89, 0.566, 0.30


def _gpu(
    name: str, gib: float, capability: tuple[int, int], bf16: float, fp8: float, fp32: float, tb: float, host: float, within: float,
    *, attention: float | None = None,
) -> Gpu:  # fmt: skip
    """bf16, fp8, fp32: dense TFLOP/s of the data sheet; tb: TB/s of it; host, within: GB/s that are reached."""
    plain = bf16 * (_FA2 if capability[0] >= 9 else 0.5)  # FlashAttention 2 was made for Ampere
    rates = Rates(
        matmul=bf16 * _MATMUL * 1e12,
        fp8=fp8 * _FP8 * 1e12,
        fp32=fp32 * 0.8 * 1e12,
        attention=(attention or plain) * 1e12,
        attention_plain=plain * 1e12,
        memory=tb * _MEMORY * 1e12,
        host=host * 1e9,
    )
    return Gpu(name, int(gib * GIB), capability, rates, within * 1e9)


GPUS: tuple[Gpu, ...] = (
    # memory as the driver reports it; links: NVLink per GPU as collectives reach it, else PCIe
    _gpu("B200", 178.4, (10, 0), 2250, 4500, 80, 8.0, 55, 550, attention=1100),
    _gpu("GH200", 94.5, (9, 0), 989.4, 1979, 67, 4.0, 300, 300, attention=989.4 * _FA4),
    replace(
        _gpu("H200", 139.8, (9, 0), 989.4, 1979, 67, 4.8, 54, 260, attention=560),
        rates=Rates(702e12, 1300e12, 50e12, 560e12, 300e12, 4.26e12, 54e9, source="measured on an H200, torch 2.11"),
    ),
    _gpu("H100 PCIe", 79.1, (9, 0), 756, 1513, 51, 2.0, 50, 45, attention=756 * _FA4),
    _gpu("H100 NVL", 93.1, (9, 0), 835.5, 1671, 60, 3.9, 50, 200, attention=835.5 * _FA4),
    _gpu("H100", 79.1, (9, 0), 989.4, 1979, 67, 3.35, 54, 260, attention=989.4 * _FA4),
    _gpu("H800", 79.1, (9, 0), 989.4, 1979, 67, 3.35, 54, 140, attention=989.4 * _FA4),
    _gpu("A100-40", 39.4, (8, 0), 312, 0, 19.5, 1.55, 24, 200),
    _gpu("A100-80", 79.2, (8, 0), 312, 0, 19.5, 2.0, 24, 200),
    _gpu("A100", 79.2, (8, 0), 312, 0, 19.5, 2.0, 24, 200),
    _gpu("L40S", 44.4, (8, 9), 362, 733, 91.6, 0.86, 24, 20),
    _gpu("L40", 44.4, (8, 9), 181, 362, 90.5, 0.86, 24, 20),
    _gpu("L4", 22.0, (8, 9), 121, 242, 30.3, 0.3, 12, 10),
    _gpu("A10G", 22.0, (8, 6), 70, 0, 35, 0.6, 12, 10),
    _gpu("A40", 44.4, (8, 6), 149.7, 0, 37.4, 0.7, 24, 20),
    _gpu("RTX 6000 Ada", 47.4, (8, 9), 364.2, 728, 91.1, 0.96, 24, 20),
    _gpu("RTX A6000", 47.4, (8, 6), 154.8, 0, 38.7, 0.77, 24, 20),
    _gpu("RTX 5090", 31.4, (12, 0), 209.5, 419, 104.8, 1.79, 50, 40),
    _gpu("RTX 4090", 23.5, (8, 9), 165.2, 330, 82.6, 1.01, 24, 12),
    _gpu("RTX 3090", 23.5, (8, 6), 71, 0, 35.6, 0.94, 24, 12),
)
ACROSS = 45e9
"""Bytes/s of a collective between nodes, per GPU: one 400 Gb/s adapter a GPU, at 90 %."""
UNKNOWN = replace(_gpu("GPU", 24.0, (8, 0), 125, 0, 20, 0.8, 12, 10))
"""Stands in for a GPU that the table does not know; its memory is asked from the driver or given."""


def find_gpu(name: str) -> Gpu | None:
    """The table's GPU for what a user types or a driver reports ("H200", "4090", "NVIDIA A100-SXM4-80GB"); None: not known.

    Entries with longer names come before those that they contain.
    """
    words = _words(name)
    if "a100" in words and "40gb" in words:
        words += "a100-40"
    return next((gpu for gpu in sorted(GPUS, key=lambda g: -len(g.name)) if _words(gpu.name) in words), None) or next(
        (gpu for gpu in GPUS if words and words == _words(gpu.name).replace("rtx", "")), None
    )


def _words(name: str) -> str:
    return re.sub(r"[^a-z0-9-]", "", name.lower().replace("nvidia", "").replace("geforce", ""))


def calibration_file(device_name: str) -> Path:
    """Where the figures of a GPU of this name lie."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rft" / "calibration" / (re.sub(r"[^A-Za-z0-9]+", "-", device_name).strip("-").lower() + ".json")


def rates_of(device_name: str) -> Rates:
    """Of a GPU by its driver's name: measured on this machine, else the table's, else a guess at a small GPU."""
    gpu = find_gpu(device_name) or UNKNOWN
    measured = read_calibration(device_name)
    return replace(gpu.rates, **measured) if measured else gpu.rates


def read_calibration(device_name: str) -> dict[str, Any]:
    """What `rft doctor --calibrate` wrote for it; empty where nothing, or nothing of use, is there."""
    path = calibration_file(device_name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    rates = found.get("rates") if isinstance(found, dict) else None
    names = {f.name for f in fields(Rates)} - {"source"}
    if not isinstance(rates, dict):
        return {}
    kept = {k: v for k, v in rates.items() if k in names and type(v) in (int, float) and v >= 0}
    if not kept:
        return {}
    return {**kept, "source": f"measured by rft doctor --calibrate on {str(found.get('date', 'an unknown day'))[:10]}"}


def write_calibration(device_name: str, rates: dict[str, float], date: str) -> Path:
    """Keep measured figures; replaces those of an earlier time."""
    path = calibration_file(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        json.dumps({"gpu": device_name, "date": date, "rates": rates}, indent=1) + "\n", encoding="utf-8"
    )
    os.replace(temporary, path)
    return path


def describe_rates(rates: Rates) -> dict[str, Any]:
    """Plain values for JSON."""
    return asdict(rates)
