"""Balance: how much longer the busiest of 8 ranks works than the mean, packs dealt as they come and by cost.

Straggler = mean over steps of (largest rank cost / mean rank cost); the cost of a pack is its tokens + k x the sum of squared
lengths, k as in a model of 7B and one of 0.6B. Packs are those of `stream`. `least-possible` is a bound that no dealing of equally many packs
can beat; `best-possible` are both bounds of the best one, found by search, over the first steps of 4 micro-batches.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from _lengths import draw
from _optimum import EACH, at_least, optimum

from results import Results
from rft import _native

RANKS = 8
MODELS = {"7b": 2 * 4096 * 32 / 14e9, "0.6b": 2 * 2048 * 28 / 1.2e9}
"""Attention FLOPs a pair of tokens over matmul FLOPs a token: 2 x width x layers / (2 x parameters)."""


EXACT_STEPS = 100
"""Steps of which the best dealing is searched for."""


def stragglers(cost, dealt) -> list[float]:
    """dealt: for each step the packs of each rank."""
    sums = np.array([[cost[packs].sum() for packs in step] for step in dealt])
    return [float((sums.max(1) / sums.mean(1)).mean())]


def least_possible(cost, steps: int, each: int) -> float:
    """What no dealing of equally many packs can do better than."""
    by_step = -np.sort(-cost[: steps * RANKS * each].reshape(steps, -1), axis=1)
    return float(np.mean([at_least(costs.tolist(), RANKS, each) / (costs.sum() / RANKS) for costs in by_step]))


def best_possible(cost, dealt) -> tuple[list[float], float]:
    """Bounds of what the best dealing gives, and what ours gives, over the first steps (an exact search)."""
    low, high, ours = [], [], []
    for step in dealt[:EXACT_STEPS]:
        sums = [float(cost[packs].sum()) for packs in step]
        mean, known = sum(sums) / RANKS, max(sums)
        bounds = optimum(cost[np.concatenate(step)].tolist(), RANKS, known)
        low.append(bounds[0] / mean)
        high.append(bounds[1] / mean)
        ours.append(known / mean)
    return [float(np.mean(low)), float(np.mean(high))], float(np.mean(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--count", type=int, default=200_000, help="documents")
    args = parser.parse_args()
    results = Results(args.results)
    for name in ("openhermes", "sharegpt", "longcot"):
        lengths, capacity = draw(name, args.count)
        items, offsets = _native.pack(lengths, capacity, "stream", seed=1)
        sizes, starts = lengths[items].astype(np.uint64), offsets[:-1].astype(np.int64)
        tokens, squares = np.add.reduceat(sizes, starts), np.add.reduceat(sizes**2, starts)
        for each in (1, 4, 8):
            packs = RANKS * each
            steps = len(tokens) // packs
            start = time.process_time()
            dealt = [
                [
                    np.array(hand) + step * packs
                    for hand in _native.deal(squares[step * packs : (step + 1) * packs], RANKS, each)
                ]
                for step in range(steps)
            ]
            per_step = (time.process_time() - start) / steps
            plain = [[np.arange(rank, packs, RANKS) + step * packs for rank in range(RANKS)] for step in range(steps)]
            case = f"balance/{name}-{capacity}/8-ranks-x{each}"
            results.add(case, "rft", "microseconds_a_step", per_step * 1e6)
            for model, k in MODELS.items():
                cost = tokens + k * squares
                results.add(case, "rft", f"straggler_{model}", stragglers(cost, dealt))
                results.add(case, "as-they-come", f"straggler_{model}", stragglers(cost, plain))
                results.add(case, "least-possible", f"straggler_{model}", least_possible(cost, steps, each))
                if each == EACH:
                    best, ours = best_possible(cost, dealt)
                    results.add(f"{case}/first-{EXACT_STEPS}", "best-possible", f"straggler_{model}", best)
                    results.add(f"{case}/first-{EXACT_STEPS}", "rft", f"straggler_{model}", ours)


if __name__ == "__main__":
    main()
