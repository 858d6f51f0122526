"""MFU's numerator counts what is needed, its denominator what the vendor promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rft.training.flops import FlopCounter, peak_flops, real_lengths, seen_pairs
from support.stub_run import join, pack

COUNTER = FlopCounter(frozen=1000, trained=10, head=100, head_trained=False, attention_widths=((64, None), (64, 4)))


def test_frozen_weights_count_4_trained_ones_6_the_head_for_labels_alone():
    batch = pack([1, 2, 3, 4, 5, 6], labelled=[False, True, False, True, True, True], size=16)
    no_attention = replace(COUNTER, attention_widths=())
    assert no_attention.of(batch) == 6 * (4 * 1000 + 6 * 10) + 4 * 4 * 100
    trained_head = replace(no_attention, head_trained=True)
    assert trained_head.of(batch) - no_attention.of(batch) == 4 * 2 * 100


def test_attention_counts_the_pairs_that_each_document_sees():
    two = replace(join([pack([1] * 6), pack([1] * 3)]), pack_tokens=(9,))
    only_attention = replace(COUNTER, frozen=0, trained=0, head=0)
    full, windowed = (21 + 6) * 64 * 12, ((10 + 2 * 4) + 6) * 64 * 12
    assert only_attention.of(two) == full + windowed


@pytest.mark.parametrize(
    ("length", "window", "pairs"), [(1, None, 1), (4, None, 10), (4, 4, 10), (6, 4, 18), (5, 1, 5)]
)
def test_pairs_of_a_causal_document(length: int, window: int | None, pairs: int):
    brute = sum(min(i + 1, window or length) for i in range(length))
    assert seen_pairs(length, window) == pairs == brute


def test_fill_up_is_no_document():
    batch = join([pack([1] * 5, size=8), pack([], size=8), pack([1] * 8, size=8)])
    assert real_lengths(batch) == [5, 8]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H20", 148.0), ("NVIDIA A100-SXM4-80GB", 312.0),
     ("NVIDIA A10G", 70.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.05)],
)  # fmt: skip
def test_peaks_by_name(name: str, tflops: float):
    assert peak_flops(name, "bf16") == pytest.approx(tflops * 1e12)


def test_an_unknown_device_has_no_peak_and_so_no_mfu():
    assert peak_flops("AVX-512 BF16", "bf16") is None
