"""Device time of a call: each repetition between two events, or replayed from a CUDA graph where launches would dominate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import Results

Call = Callable[[], object]
CACHE_BYTES = 256 << 20
"""Several times the L2 of an H200: inputs are rotated among copies that together are larger."""


def event_times(call: Call, *, repeats: int = 20, warmup: int = 5) -> list[float]:
    """Milliseconds of each repetition."""
    for _ in range(warmup):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in marks:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


def graph_times(call: Call, *more: Call, repeats: int = 20, inner: int = 4) -> list[float]:
    """Milliseconds of one call: at least `inner` of them captured into a graph, `more` in turn, the graph replayed `repeats` times.

    What Python and the launches cost is left out: for kernels that a training step enqueues far ahead of the device. `more` are
    the same call over other tensors, so that no call finds its inputs in the cache.
    """
    calls = (call, *more)
    calls *= max(1, inner // len(calls))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for one in calls:
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in calls:
            one()
    return [ms / len(calls) for ms in event_times(graph.replay, repeats=repeats, warmup=3)]


def extra_gib(call: Call, forget: Call) -> float:
    """Most memory allocated during the call, less what was allocated before it, in GiB; `forget` drops what a call leaves."""
    call()  # workspaces of libraries
    forget()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def copy_bandwidth() -> float:
    """Bytes a second of a device copy, read and written, over 4 GiB: the ceiling of elementwise kernels."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    times = event_times(lambda: target.copy_(source), repeats=10)
    return 2 * source.nbytes / (sorted(times)[len(times) // 2] / 1e3)


def passes(function: Callable, inputs: list[torch.Tensor], *rest) -> tuple[Call, Call]:
    """(forward alone, forward and backward) over copies of `inputs` that require gradients."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.no_grad():
        out = function(*inputs, *rest)
    grads = [torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,))]

    def forward() -> object:
        with torch.no_grad():
            return function(*inputs, *rest)

    def forward_backward() -> object:
        return torch.autograd.grad(function(*inputs, *rest), inputs, grads)

    return forward, forward_backward


def compare_passes(
    results: Results,
    case: str,
    systems: dict[str, Callable],
    inputs: list[torch.Tensor],
    *rest,
    floor_ms: tuple[float, float],
) -> None:
    """Times of `case`/forward and `case`/forward-backward for every system, and the floor that the bytes set."""
    results.add(f"{case}/forward", "floor", "ms", floor_ms[0])
    results.add(f"{case}/forward-backward", "floor", "ms", floor_ms[1])
    cases = f"{case}/forward", f"{case}/forward-backward"
    copies = min(8, max(1, CACHE_BYTES // sum(t.nbytes for t in inputs)))
    for name, function in systems.items():
        try:  # a system that fails is written down as failed
            sets = [passes(function, inputs, *rest) for _ in range(copies)]
            for one, calls in zip(cases, zip(*sets, strict=True), strict=True):
                results.add(one, name, "ms", graph_times(*calls))
        except Exception as error:
            for one in cases:
                results.error(one, name, f"{type(error).__name__}: {str(error)[:300]}")


def start(doc: str | None, *peers: str) -> tuple[Results, float]:
    """(results that name the versions of the peers, bytes a second of a copy) for a bench over elementwise kernels."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--results", type=Path, help="append result lines here")
    results = Results(parser.parse_args().results, versions=versions_of(*peers))
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    results.add("copy/4-gib", "torch", "gb_per_second", bandwidth / 1e9)
    torch.cuda.empty_cache()
    return results, bandwidth


def versions_of(*packages: str) -> dict[str, str]:
    """Installed versions, "not installed" where there is none."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
