"""What this process runs on, as far as decisions and the first line of output need it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

HOST_SHARE = 0.8
"""Of the host memory that is free at the start: what offloading may take where the config does not say."""


@dataclass(frozen=True)
class Machine:
    """One rank's device and how many ranks there are."""

    kind: Literal["cuda", "cpu"]
    device_name: str
    memory_bytes: int
    """Of the GPU, or of the whole machine for a CPU."""
    world_size: int
    bf16: bool
    """Whether it computes in bf16 natively."""
    cores: int
    per_node: int = 0
    """GPUs of one node; 0: all ranks are on one."""
    host_bytes: int | None = None
    """Of the machine's memory that this rank may pin; None: not known, as of a machine that is planned for."""

    def describe(self) -> str:
        """`1x NVIDIA H200 139 GiB`, or `cpu, 2 cores (AVX-512 BF16)`."""
        if self.kind == "cuda":
            gib = self.memory_bytes / 2**30
            return (
                f"{self.world_size}x {self.device_name} {gib:.0f} GiB"
                if gib >= 10
                else f"{self.world_size}x {self.device_name} {gib:.2g} GiB"
            )
        ranks = f"{self.world_size} processes on " if self.world_size > 1 else ""
        return f"{ranks}cpu, {self.cores} cores ({self.device_name})"


def inspect_machine(device: torch.device, world_size: int) -> Machine:
    """Facts of the device that this process trains on."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Machine(
            kind="cuda",
            device_name=properties.name,
            memory_bytes=properties.total_memory,
            world_size=world_size,
            bf16=properties.major >= 8,  # Ampere; older cards emulate it slowly
            cores=usable_cores(),
            host_bytes=int(HOST_SHARE * free_host_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", world_size))),
        )
    return Machine(
        kind="cpu",
        device_name=cpu_features(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        world_size=world_size,
        bf16=cpu_has_bf16(),
        cores=usable_cores(),
    )


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: those it may run on, or the container's share of time where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup, no limit ("max")
        return cores


def limit_threads() -> None:
    """No more threads than cores: torch counts the machine's, and threads without a core of their own spin and wait."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > (cores := usable_cores()):
        torch.set_num_threads(cores)


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices itself (AVX-512 BF16 or AMX)."""
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def cpu_features() -> str:
    """The widest arithmetic that matters here."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        return "AMX BF16"
    if torch.cpu._is_avx512_bf16_supported():
        return "AVX-512 BF16"
    return {"AVX512": "AVX-512", "AVX2": "AVX2"}.get(torch.backends.cpu.get_cpu_capability(), "no AVX2")


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory that could be taken now: what the system says is available, and no more than this container has left."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = min(free, int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        limit, used = ((cgroup / name).read_text() for name in ("memory.max", "memory.current"))
        free = min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup, no limit ("max")
        pass
    return free
