"""The section of docs/performance.md about one GPU: whole steps, kernels and FP8 curves, from the lines that the benches have stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- steps: written by `python bench/train/step.py --page` -->", "<!-- /steps -->"
EMPTY = "No figure is stored yet; `python bench/device.py --out DIR --all` on a machine with a GPU makes them."

Line = dict[str, Any]
Figures = dict[tuple[str, str], dict[str, Line]]
"""(case, metric) -> system -> its newest line on a GPU."""


def read(folder: Path) -> Figures:
    """Newest line of each case, metric and system; what was measured on a CPU is no figure of a GPU."""
    figures: Figures = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "metric" not in line or "cores" in line["device"]:
                continue
            systems = figures.setdefault((line["case"], line["metric"]), {})
            if line["system"] not in systems or line["date"] >= systems[line["system"]]["date"]:
                systems[line["system"]] = line
    return figures


def amount(line: Line) -> str:
    """Median, and smallest to largest where there are several."""
    digits = 0 if line["median"] >= 1000 else 2 if line["median"] >= 10 else 3
    shown = f"{line['median']:,.{digits}f}"
    return shown if line["n"] == 1 else f"{shown} ({line['low']:,.{digits}f} to {line['high']:,.{digits}f})"


def steps(figures: Figures) -> list[str]:
    lines = ["| case | system | tokens/s | peak GiB | rft of it |", "|---|---|---|---|---|"]
    for (case, metric), systems in sorted(figures.items()):
        if not case.startswith("train/llama-") or metric != "tokens_per_second":
            continue
        ours = systems.get("rft")
        for system, line in sorted(systems.items(), key=lambda item: -item[1]["median"]):
            gib = figures.get((case, "gib"), {}).get(system)
            # a ratio is of one run or none: clocks differ from run to run
            same = ours is not None and system != "rft" and ours["run"] == line["run"]
            ratio = f"{ours['median'] / line['median']:.2f}" if same and ours is not None else ""
            peak = f"{gib['median']:.1f}" if gib else ""
            lines.append(f"| {case.removeprefix('train/')} | {system} | {amount(line)} | {peak} | {ratio} |")
    return lines if len(lines) > 2 else []


def kernels(figures: Figures) -> list[str]:
    lines = ["| kernel | rft, ms | floor | fastest peer | rft of it |", "|---|---|---|---|---|"]
    for (case, metric), systems in sorted(figures.items()):
        if metric != "ms" or case.startswith(("train/", "tune/")) or "rft" not in systems:
            continue
        ours = systems["rft"]
        floor = f"{systems['floor']['median']:.3f}" if "floor" in systems else ""
        peers = [x for n, x in systems.items() if n not in ("rft", "floor") and x["run"] == ours["run"]]
        best = min(peers, key=lambda line: line["median"], default=None)
        peer = f"{best['system']} {amount(best)}" if best else ""
        ratio = f"{best['median'] / ours['median']:.2f}" if best else ""
        lines.append(f"| {case} | {amount(ours)} | {floor} | {peer} | {ratio} |")
    return lines if len(lines) > 2 else []


def curves(figures: Figures) -> list[str]:
    lines = []
    for (case, metric), systems in sorted(figures.items()):
        if not metric.startswith("percent_of_") or "/curve-" not in case or "rft" not in systems:
            continue
        what = metric.removeprefix("percent_of_").replace("_", " ")
        line = systems["rft"]
        lines.append(f"- `{case.removeprefix('train/')}`: {what} differ from bf16's by at most {line['high']:.2f} %")
    return lines


def plans(figures: Figures) -> list[str]:
    lines = ["| setting | GiB planned | measured | tokens/s planned | measured |", "|---|---|---|---|---|"]
    for (case, metric), systems in sorted(figures.items()):
        if not case.startswith("plan/") or metric != "tokens_per_second" or "rft" not in systems:
            continue
        shown = [
            figures.get((case, name), {}).get("rft")
            for name in ("gib planned", "gib", "tokens_per_second planned", "tokens_per_second")
        ]
        cells = " | ".join("" if line is None else amount(line) for line in shown)
        lines.append(f"| {case.removeprefix('plan/')} | {cells} |")
    return lines if len(lines) > 2 else []


def section(figures: Figures) -> str:
    parts = [part for part in (steps(figures), kernels(figures), plans(figures), curves(figures)) if part]
    devices = sorted({line["device"] for systems in figures.values() for line in systems.values()})
    body = ["\n".join(part) for part in parts] or [EMPTY]
    head = [f"Medians (smallest to largest) on {', '.join(devices)}; ratios within one run only."] if parts else []
    return "\n\n".join([BEGIN, *head, *body, END]) + "\n"


def write_page(results: Path = ROOT / "bench" / "results", docs: Path = ROOT / "docs") -> int:
    """Rewrite the section between its marks, which have to be there."""
    path = docs / "performance.md"
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    if not found or END not in rest:
        print(f"{path} has no {BEGIN} ... {END}")
        return 1
    after = rest.partition(END)[2].removeprefix("\n")
    path.write_text(before + section(read(results)) + after, encoding="utf-8")
    return 0
