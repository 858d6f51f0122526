"""The section of docs/performance.md about several GPUs, and its plot, from the lines that scaling.py has stored."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- scaling: written by `python bench/train/scaling.py --page` -->", "<!-- /scaling -->"
SAYS_WAITING = 0.05
"""Share of a step spent waiting above which communication is what limits."""

Figures = dict[tuple[str, str, str], dict[str, Any]]
"""(case, system, metric) -> the newest line."""


@dataclass
class Row:
    """One setting and length on one number of GPUs."""

    setting: str
    work: str
    ranks: int
    ours: dict[str, float] = field(default_factory=dict)
    peer: str = ""
    theirs: dict[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        """Share of our step in which the GPU only waits for others."""
        tokens = float(self.work.rpartition("-")[2])
        return self.ours.get("wait_ms", 0.0) / 1e3 * self.ours["tokens_per_second"] / tokens


def read(folder: Path) -> Figures:
    """Newest line of each case, system and metric that scaling.py measured on GPUs."""
    newest: Figures = {}
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["case"].startswith("scaling/") and "metric" in line:
                key = (line["case"], line["system"], line["metric"])
                if key not in newest or line["date"] >= newest[key]["date"]:
                    newest[key] = line
    return newest


def rows_of(figures: Figures) -> list[Row]:
    """The speed lines, by setting, length and number of GPUs."""
    rows: dict[tuple[str, str, int], Row] = {}
    for (case, system, metric), line in figures.items():
        parts = case.split("/")
        if len(parts) != 5 or not parts[4].startswith(("doc-", "packed-")):
            continue
        key = ("/".join(parts[2:4]), parts[4], int(parts[1]))
        row = rows.setdefault(key, Row(*key))
        if system == "rft":
            row.ours[metric] = line["median"]
        else:
            row.peer, row.theirs[metric] = system, line["median"]
    order = lambda key: (key[0], -float(key[1].rpartition("-")[2]), key[2])  # noqa: E731
    return [rows[key] for key in sorted(rows, key=order) if "tokens_per_second" in rows[key].ours]


def limit(row: Row) -> str:
    if row.ranks == 1:
        return "computing"
    share = row.waiting
    return f"waits {share:.0%} of a step for others" if share > SAYS_WAITING else f"computing (waits {share:.0%})"


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| work | GPUs | tok/s a GPU | of one GPU | peak | peer | of the peer | what limits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.ours.get("percent_of_one_gpu")
        theirs = row.theirs.get("tokens_per_second")
        lines.append(
            f"| {row.setting}, {row.work} | {row.ranks} | {row.ours['tokens_per_second']:,.0f} | {f'{one:.1f} %' if one else ''} | "
            f"{row.ours.get('gib', 0):.1f} GiB | {f'{row.peer} {theirs:,.0f}' if theirs else ''} | "
            f"{'{:.2f}x'.format(row.ours['tokens_per_second'] / theirs) if theirs else ''} | {limit(row)} |"
        )
    return lines


def others(figures: Figures) -> list[str]:
    """Bandwidth, equal losses, checkpoints and the killed rank, a line each."""
    lines = []
    for (case, system, metric), line in sorted(figures.items()):
        value = line["median"]
        if metric == "gb_per_second":
            lines.append(
                f"- {case.split('/')[1]} GPUs, {case.rpartition('/')[2]} ({system}): {value:.0f} GB/s received by each"
            )
        elif metric == "relative_loss_error":
            lines.append(f"- `{case.partition('/')[2]}`: losses differ by {value:.1e} at most")
        elif metric in ("save_seconds", "load_seconds", "gib_on_disk"):
            what = {"save_seconds": "saved in", "load_seconds": "loaded in", "gib_on_disk": "takes"}[metric]
            lines.append(
                f"- `{case.partition('/')[2]}`: {what} {value:.1f} {'GiB' if metric == 'gib_on_disk' else 's'}"
            )
        elif case.endswith("killed-rank"):
            lines.append(
                f"- a rank of {case.split('/')[1]} killed with SIGKILL: the command ended after {value:.1f} s and went on when started again"
            )
    return lines


def section(figures: Figures) -> str:
    rows = rows_of(figures)
    device = next(iter(figures.values()))["device"] if figures else ""
    if not rows and not figures:
        body = [
            "No figure is stored yet; `python bench/train/scaling.py --results FILE` on a machine with several GPUs makes them."
        ]
    else:
        body = [f"{device}; random weights in the real shapes, one document a row, medians of {8} steps."]
        body += ["", *table(rows), "", "![tokens a second and GPU by number of GPUs](scaling.svg)"] if rows else []
        body += ["", *others(figures)]
    return "\n".join([BEGIN, "", *body, "", END])


def put(text: str, new: str) -> str:
    """The page with its section replaced, or added at the end."""
    if BEGIN in text and END in text:
        return text[: text.index(BEGIN)] + new + text[text.index(END) + len(END) :]
    return text.rstrip() + "\n\n## Several GPUs\n\n" + new + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Speed a GPU against the number of GPUs, a line a setting and length; the competitor dashed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scaling"  # the same lines give the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for number, name in enumerate(sorted({(row.setting, row.work) for row in rows})):
        own = sorted((row for row in rows if (row.setting, row.work) == name), key=lambda row: row.ranks)
        colour = f"C{number}"
        axes.plot(
            [r.ranks for r in own],
            [r.ours["tokens_per_second"] for r in own],
            "o-",
            color=colour,
            label=", ".join(name),
        )
        other = [row for row in own if "tokens_per_second" in row.theirs]
        axes.plot([r.ranks for r in other], [r.theirs["tokens_per_second"] for r in other], "x--", color=colour)
    ranks = sorted({row.ranks for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("tokens/s a GPU (dashed: transformers)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_page(results: Path = ROOT / "bench" / "results", docs: Path = ROOT / "docs") -> int:
    figures = read(results)
    page = docs / "performance.md"
    page.write_text(put(page.read_text(encoding="utf-8"), section(figures)), encoding="utf-8")
    rows = rows_of(figures)
    if rows:
        plot(rows, docs / "scaling.svg")
    print(f"{page}: {len(rows)} rows" if figures else f"{page}: no figures stored")
    return 0
