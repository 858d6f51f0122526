"""Packing: seconds for 10 million lengths against LLaMA-Factory's packer, fill, and how random the batches are.

    python bench/run.py data/pack -- --llamafactory DIR

DIR: LLaMA-Factory's sources (`pip download --no-deps --no-binary :all: llamafactory`, unpacked); its own function is taken
from `src/llamafactory/data/processor/processor_utils.py`, which imports nothing else. Times are CPU seconds of one core, the
median of several repetitions: first of the packing alone, in the order given, as the peer does it in its batches of 1000
examples; then (`-shuffled`) with the seeded order of an epoch and, for bfd, its shuffled packs.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from _lengths import DISTRIBUTIONS, draw

from results import Results
from rft import _native

PACKS_A_STEP = 64
PEER_BATCH = 1000
STRATEGIES = ("stream", "bfd", "even", "sequential")


def cpu_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return times


def batch_variance_ratio(lengths, items, offsets) -> float:
    """Variance between steps of the mean log length, over that of steps whose documents are drawn at random; 1 = as random."""
    logs, starts = np.log(lengths.astype(np.float64)), offsets[:-1].astype(np.int64)
    counts, sums = np.diff(offsets.astype(np.int64)), np.add.reduceat(logs[items], starts)
    steps = len(counts) // PACKS_A_STEP
    counts, sums = (x[: steps * PACKS_A_STEP].reshape(steps, PACKS_A_STEP).sum(1) for x in (counts, sums))
    return float(np.var(sums / counts) / (np.var(logs) / counts.mean()))


def load_peer(folder: Path) -> ModuleType:
    path = folder / "src" / "llamafactory" / "data" / "processor" / "processor_utils.py"
    spec = importlib.util.spec_from_file_location("llamafactory_processor_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def peer_packs(peer: ModuleType, lengths, capacity: int) -> int:
    batches = range(0, len(lengths), PEER_BATCH)
    return sum(len(peer.greedy_knapsack(lengths[at : at + PEER_BATCH].tolist(), capacity)) for at in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--llamafactory", type=Path, help="folder of LLaMA-Factory's sources")
    parser.add_argument("--count", type=int, default=1_000_000, help="samples of the table of fill and variance")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    peer = load_peer(args.llamafactory) if args.llamafactory else None
    results = Results(args.results, versions={"llamafactory": args.llamafactory.name} if peer else None)

    lengths, capacity = draw("alpaca", 10_000_000)
    calls = {
        "bfd": lambda: _native.pack(lengths, capacity, "bfd", shuffle=False),
        "bfd-shuffled": lambda: _native.pack(lengths, capacity, "bfd", seed=1),
        "stream": lambda: _native.pack(lengths, capacity, "stream", shuffle=False),
        "stream-shuffled": lambda: _native.pack(lengths, capacity, "stream", seed=1),
    }
    peer_times = cpu_seconds(lambda: peer_packs(peer, lengths, capacity), 2) if peer else []
    for name, call in calls.items():
        case = f"pack/{name}/10m"
        results.add(case, "rft", "seconds", cpu_seconds(call, args.repeats))
        if peer:
            results.add(case, "llama-factory", "seconds", peer_times)
        else:
            results.error(case, "llama-factory", "not given (--llamafactory)")

    for name in DISTRIBUTIONS:
        lengths, capacity = draw(name, args.count)
        tokens = int(lengths.sum(dtype=np.int64))
        for strategy in STRATEGIES:
            case = f"pack/{strategy}/{name}-{capacity}"
            call = partial(_native.pack, lengths, capacity, strategy, seed=1)
            seconds = cpu_seconds(call, 1 if strategy == "even" else 5)
            results.add(case, "rft", "seconds", seconds)
            fills, ratios = [], []
            for seed in range(3):
                items, offsets = _native.pack(lengths, capacity, strategy, seed=seed)
                assert np.array_equal(np.bincount(items, minlength=args.count), np.ones(args.count)), (
                    "not each item once"
                )
                sums = np.add.reduceat(lengths[items].astype(np.int64), offsets[:-1].astype(np.int64))
                assert sums.max() <= capacity, "a pack over its capacity"
                fills.append(100 * tokens / (len(offsets) - 1) / capacity)
                ratios.append(batch_variance_ratio(lengths, items, offsets))
            results.add(case, "rft", "fill_percent", fills)
            results.add(case, "rft", "batch_variance_ratio", ratios)
            most = int(np.diff(offsets.astype(np.int64)).max())
            results.add(case, "rft", "most_documents_a_pack", float(most))
        if peer:
            fill = 100 * tokens / peer_packs(peer, lengths, capacity) / capacity
            results.add(f"pack/stream/{name}-{capacity}", "llama-factory", "fill_percent", fill)


if __name__ == "__main__":
    main()
