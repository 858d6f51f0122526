"""The table of GPUs, and figures measured on this machine in place of it."""

from __future__ import annotations

import json

import pytest
import torch

from rft.memory.calibrate import calibrate, sustained_seconds
from rft.memory.devices import GIB, GPUS, calibration_file, find_gpu, rates_of, write_calibration


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("H200", "H200"), ("NVIDIA H200", "H200"), ("4090", "RTX 4090"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("A100-80", "A100-80"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"), ("L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA L40", "L40"), ("NVIDIA GH200 480GB", "GH200"),
    ],
)  # fmt: skip
def test_names_that_people_and_drivers_use_find_their_gpu(said, name):
    found = find_gpu(said)
    assert found is not None
    assert found.name == name


def test_a_gpu_that_is_not_known_is_not_found_and_the_figures_are_sane():
    assert find_gpu("AVX-512") is None
    assert find_gpu("") is None
    for gpu in GPUS:
        rates = gpu.rates
        assert 8 * GIB < gpu.memory_bytes < 300 * GIB, gpu.name
        assert rates.attention_plain <= rates.attention < rates.matmul, gpu.name
        assert rates.fp32 < rates.matmul < rates.memory * 1000, gpu.name
        assert bool(rates.fp8) == (gpu.capability >= (8, 9)), gpu.name


def test_measured_figures_take_the_place_of_the_table_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = rates_of("NVIDIA H200")
    path = write_calibration("NVIDIA H200", {"matmul": 650e12, "launch": 1e-3}, "2026-11-30T12:00:00")
    assert path == calibration_file("NVIDIA H200")
    after = rates_of("NVIDIA H200")
    assert (after.matmul, after.launch, after.memory) == (650e12, 1e-3, before.memory)
    assert "2026-11-30" in after.source
    assert rates_of("NVIDIA H100").matmul != 650e12
    for broken in ("", "[]", json.dumps({"rates": {"matmul": "fast", "source": "x", "nothing": 1}})):
        path.write_text(broken)
        assert rates_of("NVIDIA H200") == before


def test_calibration_measures_what_this_device_has():
    """On a CPU with few rows: the path is run, and the figures are of the right order for one."""
    found = dict(calibrate(torch.device("cpu"), tokens=16, sustained=0.05))
    assert set(found) == {"matmul", "fp32", "memory", "host"}
    assert 1e8 < found["fp32"] < 1e14
    assert 1e7 < found["memory"] < 1e13


def test_a_rate_is_that_of_work_that_has_gone_on_for_a_while(monkeypatch):
    """A device that is fast for its first 0.2 s and then held at half of that: what counts is the half."""
    now = [0.0]
    monkeypatch.setattr("rft.memory.calibrate.time.perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += 1e-3 if now[0] < 0.2 else 2e-3

    assert sustained_seconds(run, torch.device("cpu"), 0.5) == pytest.approx(2e-3)
    assert 0.5 < now[0] < 1.1
    now[0] = 0.0
    assert sustained_seconds(run, torch.device("cpu"), 0.05) == pytest.approx(1e-3)
