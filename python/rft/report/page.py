"""report.html: header, headline numbers, curves, data, samples, receipts, environment. No script, nothing fetched."""

from __future__ import annotations

import html
import statistics
from collections.abc import Collection, Iterable, Sequence
from importlib.resources import files
from typing import Any

import rft
from rft.report import plots
from rft.report.environment import environment
from rft.report.read import RunRecord
from rft.report.sets import DataView, data_view
from rft.report.units import count, duration, gib, percent, rate, significant

escape = html.escape


def render(run: RunRecord) -> str:
    """The whole page as text."""
    view = data_view(run)
    sections = [
        _header(run),
        _tiles(run),
        _section("Curves", _curves(run)),
        _section("Data", _data(run, view)),
        _section("Samples", _samples(view)),
        _section("Memory", _memory(run)) if run.plan.get("planned") else "",
        _section("Receipts", _receipts(run)),
        _section("Verification", _verification(run)) if run.verify else "",
        _section("Environment", _environment(run)),
    ]
    style = files("rft.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # an empty icon: browsers ask the server for /favicon.ico otherwise
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(run.name)} · rft report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in sections if part)
        + f"\n<footer>Written by rft {rft.__version__}. This file fetches nothing and runs nothing.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str) -> str:
    return f'<section id="{title.lower()}">\n<h2>{title}</h2>\n{body}\n</section>'


def _header(run: RunRecord) -> str:
    adapter = run.config.get("adapter", {})
    kind = "full fine-tuning" if adapter.get("name") == "none" else f"LoRA r {adapter.get('r', '?')}"
    model = run.config.get("model", {}).get("path", "?").rstrip("/").rsplit("/", 1)[-1]
    last = run.train[-1]["step"] if run.train else 0
    state = "finished" if run.finished else f"not finished: last logged step is {last:,}"
    return f"<header>\n<h1>{escape(run.name)}</h1>\n<p>{escape(model)} · {escape(kind)} · {state}</p>\n</header>"


def _tile(name: str, value: str, more: str = "") -> str:
    extra = f'<div class="more">{more}</div>' if more else ""
    return f'<div class="tile"><div class="name">{name}</div><div class="value">{value}</div>{extra}</div>'


def _tiles(run: RunRecord) -> str:
    tiles = []
    measured = [line for line in run.evals if isinstance(line.get("loss"), int | float)]
    losses = [line["loss"] for line in measured]
    if losses:
        best = min(range(len(losses)), key=losses.__getitem__)
        value = f"{losses[0]:.3f} → {losses[-1]:.3f}" if len(losses) > 1 else f"{losses[0]:.3f}"
        tiles.append(_tile("held-out loss", value, f"best {losses[best]:.3f} at step {measured[best]['step']:,}"))
    if run.train:
        tiles.append(
            _tile("steps", f"{run.train[-1]['step']:,}", f"{significant(run.train[-1].get('epoch', 0))} epochs")
        )
    tokens, labels = sum(run.series("tokens")[1]), sum(run.series("label_tokens")[1])
    if tokens:
        tiles.append(_tile("tokens", count(tokens), f"{percent(labels / tokens)} with a label"))
    if speeds := run.series("tokens_per_second")[1]:
        tiles.append(_tile("speed", f"{count(statistics.median(speeds))} tok/s", "median of the logged steps"))
    if shares := run.series("mfu")[1]:
        tiles.append(_tile("MFU", percent(statistics.median(shares)), "needed FLOPs over the dense peak"))
    if peaks := run.series("memory_peak_bytes")[1]:
        tiles.append(_tile("peak memory", gib(max(peaks))))
    if phases := _phases(run):
        tiles.append(_tile("time in steps", duration(sum(map(sum, phases[1].values())))))
    return f'<div class="tiles">\n{"".join(tiles)}\n</div>' if tiles else ""


def _phases(run: RunRecord) -> tuple[list[int], dict[str, list[float]]] | None:
    """Steps and the seconds of each phase, from lines whose `seconds` is a table."""
    lines = [line for line in run.train if isinstance(line.get("seconds"), dict)]
    if not lines:
        return None
    names = list(dict.fromkeys(name for line in lines for name in line["seconds"]))
    return [line["step"] for line in lines], {n: [_number(line["seconds"].get(n)) for line in lines] for n in names}


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else 0.0


def _curves(run: RunRecord) -> str:
    figures = []
    measured = [e for e in run.evals if isinstance(e.get("loss"), int | float)]
    held_out = ([e["step"] for e in measured], [e["loss"] for e in measured])
    if run.train or run.evals:
        figures.append(plots.loss(run.series("loss"), held_out))
    for key, title, label, zero in (
        ("lr", "Learning rate", "Learning rate over steps", True),
        ("grad_norm", "Gradient norm, before clipping", "Gradient norm over steps", True),
        ("tokens_per_second", "Tokens per second", "Tokens per second over steps", True),
    ):
        steps, values = run.series(key)
        if steps:
            figures.append(plots.line_over_steps(key, title, [("", steps, values)], label=label, from_zero=zero))
    steps, values = run.series("mfu")
    if steps:
        curve = [("", steps, [100 * v for v in values])]
        figures.append(plots.line_over_steps("mfu", "MFU (%)", curve, label="MFU over steps", from_zero=True))
    steps, values = run.series("memory_peak_bytes")
    if steps:
        curve = [("", steps, [v / 2**30 for v in values])]
        figures.append(
            plots.line_over_steps("memory", "Peak memory (GiB)", curve, label="Peak memory over steps", from_zero=True)
        )
    if (phases := _phases(run)) and len(phases[0]) > 1:
        figures.append(
            plots.stacked("seconds", "Seconds per step, by phase", *phases, label="Seconds of each phase over steps")
        )
    if not figures:
        return '<p class="note">metrics.jsonl holds no step yet.</p>'
    return f'<div class="plots">\n{"".join(figures)}\n</div>'


def _data(run: RunRecord, view: DataView) -> str:
    if not run.data and not view.histograms:
        return '<p class="note">There is no data.json in the run directory.</p>'
    parts = []
    rows: list[list[str]] = []
    for name, counts in view.counts:
        dropped = counts.get("dropped") or {}
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in dropped.items()) if dropped else "none"
        tokens = counts.get("tokens") or 0
        trained = counts.get("trained_tokens") or 0
        plan = counts.get("plan") or {}
        rows.append(
            [
                escape(name),
                f"{counts.get('read', 0):,}",
                f"{counts.get('kept', 0):,}",
                escape(reasons),
                count(tokens),
                percent(trained / tokens) if tokens else "-",
                f"{plan['packs']:,}" if "packs" in plan else "-",
                f"{100 * plan['fill']:.1f} %" if "fill" in plan else "-",
            ]
        )
    if rows:
        head = ["set", "rows read", "kept", "dropped, by reason", "tokens", "trained", "packs", "fill"]
        parts.append(_table(head, rows, numbers={1, 2, 4, 5, 6, 7}))
    for sentence in view.evidence:
        parts.append(f'<p class="note">{escape(sentence)}</p>')
    if view.histograms:
        figures = [
            plots.histogram(h.name, h.title, h.edges, h.counts, label=h.title, x_label=h.x_label)
            for h in view.histograms
        ]
        parts.append(f'<div class="plots">\n{"".join(figures)}\n</div>')
    elif view.missing:
        parts.append(f'<p class="note">No histograms: {escape(view.missing)}</p>')
    return "\n".join(parts)


def _samples(view: DataView) -> str:
    if not view.samples:
        return f'<p class="note">No samples: {escape(view.missing or "the prepared set holds no document")}</p>'
    parts = [
        '<p class="note legend">As the model sees them: <span class="t">trained on</span>, masked, '
        '<span class="s">control token</span>.</p>'
    ]
    for sample in view.samples:
        shown = "".join(_span(text, kind) for text, kind in sample.spans)
        cut = f"\n… {sample.num_cut:,} more tokens" if sample.num_cut else ""
        parts.append(f"<h3>{escape(sample.caption)}</h3>\n<div class='sample'>{shown}{cut}</div>")
    return "\n".join(parts)


def _span(text: str, kind: str) -> str:
    classes = {"trained": "t", "special": "s", "trained special": "t s"}
    return f'<span class="{classes[kind]}">{escape(text)}</span>' if kind in classes else escape(text)


def _memory(run: RunRecord) -> str:
    """By category as planned, and what of it was measured."""
    planned, measured = run.plan["planned"], run.plan.get("measured") or {}
    sizes = {**planned.get("allocated", {}), **planned.get("beside", {})}
    rows = [[escape(str(name)), gib(_number(size))] for name, size in sizes.items()]
    parts = [_table(["planned of a rank", "memory"], rows, numbers={1})]
    peaks = [
        "peak of torch's allocator",
        gib(_number(planned.get("peak_bytes"))),
        gib(_number(measured.get("peak_bytes"))),
    ]
    speeds = ["tokens/s of a rank", count(_number(planned.get("tokens_per_second")))]
    compared = [peaks if measured else [*peaks[:2], "-"]]
    ranks = max(1, int(_number(measured.get("ranks"))))
    speed = _number(measured.get("tokens_per_second")) / ranks
    compared.append([*speeds, count(speed) if speed else "-"])
    parts.append(_table(["", "planned", "measured"], compared, numbers={1, 2}))
    return "".join(parts)


def _receipts(run: RunRecord) -> str:
    if not run.receipts:
        return '<p class="note">There is no receipts.json in the run directory.</p>'
    parts = []
    if asked := run.receipts.get("asked"):
        parts.append(f'<p class="note">Asked for: {escape(", ".join(map(_plain, asked)))}</p>')
    applied = [
        [
            escape(str(entry.get("what", ""))),
            _share(entry),
            escape(_plain(entry.get("how", ""))),
            escape(_largest_errors(entry.get("checked") or {})),
        ]
        for entry in run.receipts.get("applied", [])
    ]
    if applied:
        parts.append(
            "<h3>Applied</h3>" + _table(["what", "count", "how", "checked: largest errors"], applied, numbers={1})
        )
    declined = [
        [escape(str(entry.get("what", ""))), _share(entry), escape(_plain(entry.get("why", "")))]
        for entry in run.receipts.get("declined", [])
    ]
    if declined:
        parts.append("<h3>Declined</h3>" + _table(["what", "count", "why"], declined, numbers={1}))
    rest = {k: v for k, v in run.receipts.items() if k not in ("asked", "applied", "declined", "environment")}
    if rest:
        parts.append("<h3>Decided</h3>" + _pairs((key, _plain(value)) for key, value in rest.items()))
    return "\n".join(parts)


def _largest_errors(checked: dict[str, float]) -> str:
    """One number for each type that was compared: "fp32 2.4e-7, bf16 3.9e-3"."""
    largest: dict[str, float] = {}
    for label, error in checked.items():
        kind = label.replace(",", " ").split()[0]
        largest[kind] = max(error, largest.get(kind, 0.0))
    return ", ".join(f"{kind} {rate(error)}" for kind, error in largest.items()) or "-"


def _share(entry: dict[str, Any]) -> str:
    number, of = entry.get("count"), entry.get("of")
    if number is None:
        return "-"
    return f"{number:,}" if of is None else f"{number:,} / {of:,}"


def _verification(run: RunRecord) -> str:
    rows = []
    for check in run.verify.get("checks", []):
        ok = check.get("status") == "ok"
        mark = f'<span class="{"ok" if ok else "failed"}">{escape(str(check.get("status")))}</span>'
        error, allowed = check.get("error"), check.get("allowed")
        rows.append(
            [
                escape(str(check.get("name"))),
                f"{error:.1e}" if isinstance(error, int | float) else "-",
                f"{allowed:.1e}" if isinstance(allowed, int | float) else "-",
                mark,
                escape(str(check.get("note") or "")),
            ]
        )
    return _table(["check", "largest error", "allowed", "", "note"], rows, numbers={1, 2})


def _environment(run: RunRecord) -> str:
    recorded = run.receipts.get("environment")
    pairs = recorded if isinstance(recorded, dict) else environment()
    note = "" if isinstance(recorded, dict) else '<p class="note">The machine that wrote this page.</p>'
    body = note + _pairs((key, _plain(value)) for key, value in pairs.items())
    if run.unreadable:
        body += '<p class="note">Could not be read: ' + escape("; ".join(run.unreadable)) + "</p>"
    if run.config_text:
        body += f"<details><summary>config.resolved.toml</summary><pre>{escape(run.config_text)}</pre></details>"
    return body


def _plain(value: Any) -> str:
    """A JSON value as words: no braces, numbers short."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, float):
        return rate(value) if value and not 1e-3 <= abs(value) < 1e6 else significant(value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[int] = ()) -> str:
    """A table of cells that are HTML already; `numbers` are the columns to align right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if column in numbers else ''}>{cell}</{tag}>" for column, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{cells("th", head)}</tr>\n{body}\n</table></div>'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "\n".join(f'<tr><td class="key">{escape(key)}</td><td>{escape(value)}</td></tr>' for key, value in pairs)
    return f'<div class="scroll"><table>\n{rows}\n</table></div>'
