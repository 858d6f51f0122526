"""How near the dealing of packs to ranks comes to the best there is, which a search finds."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from rft import _native

BENCH = Path(__file__).parents[2] / "bench" / "data"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    names = ("_optimum", "_lengths")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


def least_by_trying_all(costs):
    """Of twelve packs for three ranks."""
    best = float("inf")
    for first in itertools.combinations(range(1, 12), 3):
        left = [index for index in range(1, 12) if index not in first]
        one = costs[0] + sum(costs[index] for index in first)
        for second in itertools.combinations(left, 4):
            two = sum(costs[index] for index in second)
            best = min(best, max(one, two, sum(costs) - one - two))
    return best


def test_the_search_finds_the_best_and_the_bound_is_none_above_it(bench):
    optimum, _ = bench
    pick = random.Random(3)
    for case in range(12):
        costs = [pick.lognormvariate(0, 1.0 + case % 3 / 2) for _ in range(12)]
        truth = least_by_trying_all(costs)
        low, high = optimum.optimum(costs, 3, sum(costs))
        assert low <= truth * (1 + 1e-9)
        assert truth <= high * (1 + 1e-9)
        assert high - low <= 6e-4 * low
        assert optimum.at_least(sorted(costs, reverse=True), 3) <= truth * (1 + 1e-9)


def test_packs_of_long_reasoning_are_dealt_as_well_as_they_can_be(bench):
    """1.03 of the mean is what there is for 4 packs a rank: no dealing of them gets to 1.02 (docs/packing.md)."""
    optimum, lengths = bench
    documents, capacity = lengths.draw("longcot", 20_000)
    items, offsets = _native.pack(documents, capacity, "stream", seed=1)
    sizes, starts = documents[items].astype(np.uint64), offsets[:-1].astype(np.int64)
    squares = np.add.reduceat(sizes**2, starts)
    costs = np.add.reduceat(sizes, starts) + 2 * 2048 * 28 / 1.2e9 * squares
    ours, least, best = [], [], []
    for step in range(100):
        packs = slice(32 * step, 32 * (step + 1))
        own = costs[packs]
        mean = own.sum() / 8
        dealt = max(own[list(hand)].sum() for hand in _native.deal(squares[packs], 8, 4))
        low, high = optimum.optimum(own.tolist(), 8, float(dealt))
        ours.append(dealt / mean)
        least.append(low / mean)
        best.append(high / mean)
    assert np.mean(least) > 1.02
    assert np.mean(best) - np.mean(least) < 6e-4
    assert np.mean(ours) < 1.003 * np.mean(best), (np.mean(ours), np.mean(best))
