"""Run a function on several CPU ranks joined by gloo, each in a process of its own, and give back what they returned."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import queue
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died or did not end; the text holds its traceback."""


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 120.0, device: str = "cpu"
) -> list[Any]:
    """`function(world, *args)` on `world_size` ranks; returns what each returned, by rank.

    device: "cpu" (gloo), or "cuda" (a GPU each, NCCL). function: at the top level of its file (processes are spawned and import that file anew). args and results must pickle.
    Raises RankFailed with the traceback of the first rank that failed; no process outlives the call.
    """
    from rft.launch import free_port

    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    where = (str(Path(sys.modules[function.__module__].__file__ or "").resolve()), function.__qualname__)
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        context.Process(
            target=_rank, args=({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, where, args, results, device)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(processes: list[Any], results: Any, timeout: float) -> list[Any]:
    returned: dict[int, Any] = {}
    until = time.monotonic() + timeout
    while len(returned) < len(processes):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            gone = [r for r, p in enumerate(processes) if r not in returned and p.exitcode not in (None, 0)]
            if gone:
                raise RankFailed(f"rank {gone[0]} ended with exit code {processes[gone[0]].exitcode}") from None
            if time.monotonic() > until:
                raise RankFailed(
                    f"ranks {sorted(set(range(len(processes))) - returned.keys())} still ran after {timeout} s"
                ) from None
            continue
        if error:
            raise RankFailed(f"rank {rank}:\n{error}")
        returned[rank] = pickle.loads(value)
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    return [returned[rank] for rank in range(len(processes))]


def _rank(env: dict[str, str], where: tuple[str, str], args: tuple[Any, ...], results: Any, device: str) -> None:
    # Several ranks share the cores of a test machine, and equal threads make equal sums.
    os.environ.update({**env, "OMP_NUM_THREADS": "1"})
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rank = int(env["RANK"])
    try:
        from rft.parallel.mesh import join_world, leave_world

        function = _load(*where)
        world = join_world(device)
        value = function(world, *args)
        leave_world()
        # As bytes: torch would hand tensors over by shared memory, which is gone with the process.
        results.put((rank, pickle.dumps(value), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def _load(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"rank_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return getattr(module, name)
