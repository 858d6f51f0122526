"""What offloading hidden states costs over the same recompute without it, to host memory and to disk, and what the disk sustains.

    python bench/train/offload.py --results FILE              8B LoRA, one document of 32,768 tokens, one GPU
    python bench/train/offload.py --folder /mnt/fast --host-gib 4
    python bench/train/offload.py --tiny                      the same path on a CPU (no figures worth keeping)

Steps with and without are measured in turn, in one process on one model, so that clocks and allocator are the same for both.
`offload-disk` has `--host-gib` of host memory beside the disk. The disk's own rate is measured beyond what the system caches of it
(`--disk-gib`), written and read by the same threads as in training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
NEEDS = "a CUDA GPU of 80 GiB or more, host memory of 16 GiB, a disk"
ROUNDS, STEPS = 3, 2


def compare(model: Any, results: Any, case: str, recompute: Any, args: argparse.Namespace, **ways: Any) -> None:
    """One line each of slowdown, both rates and both peaks."""
    small = {"smallest": 64} if args.tiny else {}
    rates: dict[str, list[float]] = {"without": [], "with": []}
    peaks: dict[str, float] = {}
    late = moved = 0
    disk = ""
    for number in range(ROUNDS + 1):  # the first of each warms up
        for name, options in (("without", {}), ("with", ways | small)):
            offloader = model.save_memory(recompute, **options)
            model.step()
            reset_peak(model.device)
            found = model.timed(STEPS)
            peaks[name] = peak_gib(model.device)
            if number:
                rates[name] += found
            if offloader is not None:
                late, moved = offloader.fetched_late, offloader.moved_bytes
                file = offloader.pool.disk
                disk = "" if file is None else f", {file.written_bytes / 2**30:.2f} GiB to disk, {file.describe()}"
    slow = [100 * (a / b - 1) for a, b in zip(rates["without"], rates["with"], strict=True)]
    results.add(case, "rft", "slowdown_percent", statistics.median(slow))
    results.add(case, "rft", "tokens_per_second", rates["with"])
    results.add(case, "rft", "gib", peaks["with"])
    results.add(f"{case}/without", "rft", "tokens_per_second", rates["without"])
    results.add(f"{case}/without", "rft", "gib", peaks["without"])
    print(f"    {moved / 2**30:.2f} GiB moved in {STEPS + 1} steps, {late} pieces fetched late{disk}", flush=True)


def sustained(results: Any, folder: Path, gib: float, tiny: bool) -> None:
    """What the disk writes and reads through the offload file's threads, pieces of a hidden state each."""
    from rft.memory.disk import DiskFile
    from rft.pinned import HostMemory

    size = 1 << 20 if tiny else 256 << 20
    count = max(2, int(gib * 2**30) // size)
    file = DiskFile(folder, trial_bytes=1 << 20 if tiny else 64 << 20)
    buffers = [HostMemory(size, pinned=False) for _ in range(4)]
    for buffer in buffers:
        buffer.data.random_(0, 256)  # some disks and file systems compress
    offsets = [file.room(size) for _ in range(count)]
    for name, move in (("write", file.write), ("read", file.read)):
        start = time.perf_counter()
        waiting: list[Any] = []
        for number, offset in enumerate(reversed(offsets) if name == "read" else offsets):
            if len(waiting) == len(buffers):
                waiting.pop(0).result()
            waiting.append(move(offset, buffers[number % len(buffers)].data))
        for future in waiting:
            future.result()
        results.add(
            "offload-disk/sustained",
            "rft",
            f"gib_per_second {name}",
            count * size / 2**30 / (time.perf_counter() - start),
        )
    print(f"    {count * size / 2**30:.1f} GiB, {file.describe()}", flush=True)
    file.close()


def reset_peak(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: Any) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", help="file to append result lines to")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk that is measured; default the system's temporary one"
    )
    parser.add_argument("--host-gib", type=float, default=4.0, help="host memory beside the disk")
    parser.add_argument("--disk-gib", type=float, default=24.0, help="GiB of the sustained rate; 0 leaves it out")
    parser.add_argument("--cases", nargs="*", default=["cpu", "cpu-selective", "disk", "sustained"])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args()
    from _memory_model import build

    from results import Results

    results = Results(args.results)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="rft-offload-"))
    tokens = 64 if args.tiny else args.tokens
    disk_host = 3 * 16384 / 2**30 if args.tiny else args.host_gib
    name = f"llama-8b/doc-{tokens}"
    if set(args.cases) - {"sustained"}:
        model = build("llama-8b", tokens, tiny=args.tiny)
        if "cpu" in args.cases:
            compare(model, results, f"offload-cpu/{name}", "full", args, offload="cpu")
        if "cpu-selective" in args.cases:
            compare(model, results, f"offload-cpu/{name}/selective", "selective", args, offload="cpu")
        if "disk" in args.cases:
            compare(
                model, results, f"offload-disk/{name}", "full", args, offload="disk", folder=folder, host_gib=disk_host
            )  # fmt: skip
        model.save_memory("none")
    if "sustained" in args.cases and args.disk_gib > 0:
        sustained(results, folder, 0.01 if args.tiny else args.disk_gib, args.tiny)
    return 0


if __name__ == "__main__":
    sys.exit(main())
