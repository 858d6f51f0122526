"""Versions and machine, as the report shows them. Asks nothing of the network and nothing of a GPU that is busy."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "numpy")


def environment() -> dict[str, str]:
    """Name -> value: rft, Python, system, CPU, GPUs, packages."""
    import rft
    from rft.training.machine import usable_cores

    found = {
        "rft": rft.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": f"{cpu_name()}, {usable_cores()} cores",
    }
    if gpus := _gpu_names():
        found["GPU"] = gpus
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_names() -> str:
    import torch

    if not torch.cuda.is_available():
        return ""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
