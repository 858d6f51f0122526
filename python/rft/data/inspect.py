"""Samples as the model will see them: which text is which token, what is trained on, where documents meet in a pack."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from rft.data.folder import shown_path
from rft.data.loader import Loader
from rft.data.prepare import SPLIT, describe, evidence, remarks
from rft.models.tokenizer import TokenizerFiles
from rft.visible import visible, visible_line
from rft.words import counted

if TYPE_CHECKING:
    from rich.text import Text

    from rft._native import Store

_BINS = 12
_REPLACEMENT = "\ufffd"  # shown for bytes that are no whole character
_LONGEST_CHARACTER = 4  # bytes, so tokens, of one character


@dataclass(frozen=True)
class Token:
    """Some text of a sample, one token or the few that share a character."""

    ids: tuple[int, ...]
    text: str
    trained: bool
    control: bool


@dataclass(frozen=True)
class Sample:
    """A document, or the piece of one that lies in a pack."""

    document: int
    file: str
    line: int
    start: int
    """First token of the document that is in the piece."""
    tokens: tuple[Token, ...]
    length: int
    trained: int
    """Tokens that are targets. The first token of a piece never is one: nothing comes before it."""

    @property
    def spans(self) -> int:
        """Runs of trained text."""
        flags = [token.trained for token in self.tokens]
        return sum(1 for before, now in zip([False, *flags], flags, strict=False) if now and not before)

    def caption(self) -> str:
        """The line of counts under a sample."""
        part = f", from token {self.start:,} on" if self.start else ""
        spans = "span" if self.spans == 1 else "spans"
        place = f"{visible_line(shown_path(self.file))}:{self.line}{part}"
        return f"{self.length:,} tokens, {self.trained:,} trained in {self.spans} {spans}, from {place}"


class Inspector:
    """Looks into one prepared set."""

    def __init__(self, store: Store, tokenizer: TokenizerFiles, loader: Loader | None = None):
        from rft import _native

        self.store, self.loader = store, loader
        self._native = _native.Tokenizer(tokenizer.json, tokenizer.unicode)
        self._control = {tokenizer.token_id(text) for text in tokenizer.control_tokens()}

    def document(self, index: int, start: int = 0, length: int | None = None) -> Sample:
        """A document of the set, or `length` tokens of it."""
        ids, trained, _weights = self.store.document(index)
        end = len(ids) if length is None else start + length
        ids, trained = ids[start:end], trained[start:end].copy()
        if len(trained):
            trained[0] = False
        file, line = self.store.origin(index)
        tokens = tuple(self._tokens(ids, trained))
        return Sample(index, file, line, start, tokens, len(ids), int(trained.sum()))

    def pack(self, number: int, epoch: int = 0) -> list[Sample]:
        """The pieces of a pack, in order."""
        assert self.loader is not None
        return [self.document(*piece) for piece in self.loader.plan(epoch).pack(number)]

    def spread(self, count: int) -> list[Sample]:
        """`count` documents, evenly over the set."""
        total = self.store.num_documents
        chosen = np.linspace(0, total - 1, min(count, total)).round().astype(int)
        return [self.document(int(index)) for index in dict.fromkeys(chosen)]

    def histogram(self) -> list[tuple[int, int, int]]:
        """Documents by length: (from, below, how many), in steps that grow by a constant factor."""
        lengths = np.asarray(self.store.lengths())
        if lengths.size == 0:
            return []
        low, high = max(int(lengths.min()), 1), int(lengths.max()) + 1
        edges = np.unique(np.geomspace(low, high, _BINS + 1).round().astype(int))
        if edges.size == 1:
            return [(low, high, int(lengths.size))]
        counts, _ = np.histogram(lengths, bins=edges)
        return [(int(a), int(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]

    def _tokens(self, ids: np.ndarray[Any, Any], trained: np.ndarray[Any, Any]) -> Iterable[Token]:
        texts = self._native.tokens(np.ascontiguousarray(ids, dtype=np.uint32))
        at = 0
        while at < len(texts):
            taken, text = 1, texts[at]
            if _REPLACEMENT in text:
                taken, text = self._whole_characters(ids[at : at + _LONGEST_CHARACTER], text)
            group = ids[at : at + taken]
            control = taken == 1 and int(group[0]) in self._control
            # A character of several tokens counts as trained where any of them is.
            yield Token(tuple(int(i) for i in group), text, bool(trained[at : at + taken].any()), control)
            at += taken

    def _whole_characters(self, ids: np.ndarray[Any, Any], alone: str) -> tuple[int, str]:
        for taken in range(2, len(ids) + 1):
            text = self._native.decode(np.ascontiguousarray(ids[:taken], dtype=np.uint32))
            if _REPLACEMENT not in text:
                return taken, text
        return 1, alone


# ---- terminal


def as_text(sample: Sample, *, colour: bool) -> Text:
    """For the terminal. Without colour, trained text stands between ⟦ and ⟧ and control tokens keep their own marks."""
    from rich.text import Text

    text = Text()
    if colour:
        for (trained, control), run in groupby(sample.tokens, key=lambda token: (token.trained, token.control)):
            style = ("green" if trained else "dim") + (" reverse" if control else "")
            text.append("".join(_shown(token) for token in run), style)
        return text
    for trained, run in groupby(sample.tokens, key=lambda token: token.trained):
        shown = "".join(_shown(token) for token in run)
        text.append(f"⟦{shown}⟧" if trained else shown)
    return text


def _shown(token: Token) -> str:
    """What a terminal would obey, or what would reorder the text, is shown as its number."""
    return visible(token.text.replace("\r", "␍")).replace("\n", "↵\n")


def bars(histogram: Sequence[tuple[int, int, int]], width: int = 40) -> list[str]:
    """Lines of a length histogram."""
    most = max((count for *_, count in histogram), default=0)
    label = max((len(f"{low:,}-{high - 1:,}") for low, high, _ in histogram), default=0)
    return [
        f"{f'{low:,}-{high - 1:,}':>{label}}  {'█' * max(round(width * count / most), 1 if count else 0)} {count:,}"
        for low, high, count in histogram
    ]


def mask_methods(report: dict[str, Any]) -> str:
    """How the spans of the training rows were found, and how much of them is trained, in a sentence."""
    part = report["train"]
    methods = ", ".join(
        f"{counted(rows, 'row')} by {method}" for method, rows in sorted(part.get("mask_methods", {}).items())
    )
    return f"{part['trained_tokens']:,} of {part['tokens']:,} tokens trained; {methods}"


def dropped_lines(part: dict[str, Any]) -> list[str]:
    """Each reason for which rows were dropped, with the first places."""
    lines = []
    for reason, count in sorted(part.get("dropped", {}).items()):
        if count and reason not in SPLIT:
            places = [
                visible_line(shown_path(str(place))) for place in part.get("dropped_examples", {}).get(reason, [])
            ]
            lines.append(f"{reason}: {count:,}" + (f" (first: {'; '.join(places[:3])})" if places else ""))
    return lines


# ---- JSON and HTML


def as_json(report: dict[str, Any], samples: Sequence[Sample], pack: Sequence[Sample], inspector: Inspector) -> str:
    """Everything that `rft inspect` shows, for machines."""
    return json.dumps(
        {
            "report": report,
            "samples": [_plain(sample) for sample in samples],
            "pack": [_plain(sample) for sample in pack],
            "lengths": [{"from": low, "below": high, "documents": n} for low, high, n in inspector.histogram()],
        },
        ensure_ascii=False,
    )


def _plain(sample: Sample) -> dict[str, Any]:
    return asdict(sample)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1c1f23; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; padding: .8rem;
  border: 1px solid #d5d9de; border-radius: 6px; background: #fbfbfc; }
.sample + .sample { border-top: 3px solid #7a828c; }
.t { background: #c9f0d3; } .m { color: #767d86; } .c { outline: 1px solid #8a929b; border-radius: 3px; }
.note { color: #565d66; font-size: .9rem; margin: .2rem 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; }
svg text { font: 11px system-ui, sans-serif; fill: #565d66; } svg rect { fill: #5b8def; }
@media (prefers-color-scheme: dark) { body { background: #15181b; color: #e4e7ea; } .sample { background: #1c2024;
  border-color: #3a4047; } .t { background: #1f4d2e; } .m { color: #8f979f; } .note, svg text { color: #a4abb3; fill: #a4abb3; } }
"""


def as_html(
    title: str, report: dict[str, Any], samples: Sequence[Sample], pack: Sequence[Sample], inspector: Inspector
) -> str:
    """A page that needs no network: samples, a pack, the lengths, what was dropped and why."""
    parts = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(visible(text))}</p>" for text in describe(report))]
    notes = [*evidence(report), *remarks(report), mask_methods(report)]
    parts += [f'<p class="note">{html.escape(visible(text))}</p>' for text in notes]
    parts.append(
        '<p class="note"><span class="t">trained text</span>, <span class="m">masked text</span>, '
        '<span class="c">control token</span>; point at text for its ids.</p>'
    )
    parts += ["<h2>Samples</h2>", *(_sample_html(sample) for sample in samples)]
    if pack:
        parts += ["<h2>A pack, its documents in order</h2>", *(_sample_html(sample) for sample in pack)]
    parts += ["<h2>Documents by length in tokens</h2>", _histogram_html(inspector.histogram())]
    parts.append("<h2>Dropped rows</h2>")
    dropped = [line for name in ("train", "eval") if report.get(name) for line in dropped_lines(report[name])]
    parts += [f"<p>{html.escape(line)}</p>" for line in dropped] or ["<p>none</p>"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _sample_html(sample: Sample) -> str:
    pieces = []
    for token in sample.tokens:
        kind = ("t" if token.trained else "m") + (" c" if token.control else "")
        ids = " ".join(str(index) for index in token.ids)
        pieces.append(f'<span class="{kind}" title="{ids}">{html.escape(visible(token.text))}</span>')
    return f'<div class="sample">{"".join(pieces)}</div><p class="note">{html.escape(sample.caption())}</p>'


def _histogram_html(histogram: Sequence[tuple[int, int, int]]) -> str:
    most = max((count for *_, count in histogram), default=1)
    height = 22 * len(histogram)
    rows = "".join(
        f'<text x="110" y="{22 * row + 15}" text-anchor="end">{low:,} - {high - 1:,}</text>'
        f'<rect x="120" y="{22 * row + 3}" width="{max(420 * count / most, 1):.1f}" height="16"></rect>'
        f'<text x="{130 + 420 * count / most:.1f}" y="{22 * row + 15}">{count:,}</text>'
        for row, (low, high, count) in enumerate(histogram)
    )
    return f'<svg viewBox="0 0 620 {height}" width="620" height="{height}" role="img">{rows}</svg>'
