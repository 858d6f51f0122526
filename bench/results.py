"""Result lines: one JSON object a line, stamped with run, device, commit, date and versions. Every bench writes through this.

    results = Results(path)                                     # None: only shown
    results.add("pack/stream/10m", "rft", "seconds", [0.19, 0.2, 0.2])
    results.error("pack/stream/10m", "some-peer", "does not start: ...")

A line has `run` (one a `Results`), `case`, `metric`, `system` ("rft" or a peer's name), `median`, `low`, `high` (smallest and
largest), `n`, `device`, `commit`, `date` (ISO, with seconds) and `versions`; a system that failed has `error` in place of the figures.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rft-llm", "torch", "triton", "transformers", "peft", "numpy")


class Results:
    """Lines of one invocation, appended to a file as they come and shown on the terminal."""

    def __init__(
        self, path: str | Path | None = None, *, device: str | None = None, versions: dict[str, str] | None = None
    ):
        """versions: of further packages (peers), added to ours. device: where it is not the one this process sees."""
        self.path = Path(path) if path is not None else None
        self.run = f"{_now():%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self.device = device
        self.commit = commit()
        self.versions = package_versions() | (versions or {})

    def add(self, case: str, system: str, metric: str, values: Sequence[float] | float) -> dict[str, Any]:
        """A figure: one value or all repetitions. Returns the line."""
        values = list(values) if isinstance(values, Sequence) else [values]
        if not values:
            raise ValueError(f"{case} {system} {metric}: no values")
        figures = {"median": statistics.median(values), "low": min(values), "high": max(values)}
        line = {
            "case": case,
            "system": system,
            "metric": metric,
            **{k: _short(v) for k, v in figures.items()},
            "n": len(values),
        }
        self._write(
            line,
            f"{figures['median']:.4g} {metric}  ({figures['low']:.4g} to {figures['high']:.4g}, n = {len(values)})",
        )
        return line

    def error(self, case: str, system: str, text: str) -> None:
        """A system that could not be measured, and why."""
        self._write({"case": case, "system": system, "error": text}, f"error: {text}")

    def _write(self, line: dict[str, Any], shown: str) -> None:
        print(f"{line['case']:44} {line['system']:16} {shown}", flush=True)
        if self.path is None:
            return
        stamp = {
            "device": self.device
            or device_name(),  # asked for by each line: a bench may import torch after this is made
            "commit": self.commit,
            "date": _now().isoformat(timespec="seconds"),
            "versions": self.versions,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self.run, **line, **stamp}, ensure_ascii=False) + "\n")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _short(value: float) -> float:
    """Six significant digits: more is noise."""
    return float(f"{value:.6g}")


def device_name() -> str:
    """The GPUs that torch sees if it is imported here and sees one, else the CPU with its cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{len(names)}x {names[0]}" if len(names) > 1 else names[0]
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next(
            (line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")),
            cpu,
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu}, {cores} cores"


def commit() -> str:
    """Short hash of the checkout, with + where it has changes; "unknown" outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def package_versions() -> dict[str, str]:
    """Versions of what decides a figure."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
