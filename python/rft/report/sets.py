"""The prepared set of a run as the report shows it: counts, histograms, and three samples with their masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.errors import RftError
from rft.report.read import RunRecord

if TYPE_CHECKING:
    from rft.data.inspect import Inspector

TOKENS_SHOWN = 420
"""Tokens of a sample that are shown: about a screen and a half."""
TOKENS_OF_CONTEXT = 60
"""Masked tokens that stay before the first trained one where a sample has to be cut."""


@dataclass(frozen=True)
class Histogram:
    """Counts between edges (one more edge than counts)."""

    name: str
    title: str
    x_label: str
    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class Sample:
    """One document as the model sees it: (text, kind) spans, kind "masked", "trained", "special" or "trained special"."""

    caption: str
    spans: list[tuple[str, str]]
    num_cut: int


@dataclass(frozen=True)
class DataView:
    """What the data sections show; `missing` says why there are no histograms and samples."""

    counts: list[tuple[str, dict[str, Any]]]
    evidence: list[str]
    histograms: list[Histogram] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    missing: str = ""


def data_view(run: RunRecord) -> DataView:
    """Counts from data.json; histograms and samples from the prepared set, where it is still on this machine."""
    counts = [(name, run.data[name]) for name in ("train", "eval") if isinstance(run.data.get(name), dict)]
    if not counts and "read" in run.data:
        counts = [("train", run.data)]
    evidence = list(dict.fromkeys(_evidence(counts)))  # train and held-out rows of one file were decided once
    store_path = next((c["store"] for _, c in counts if isinstance(c.get("store"), str)), None)
    if any(entry.get("streamed") for _, entry in counts):
        return DataView(counts, evidence, missing="the data was streamed: it is no longer here as it was trained on")
    if store_path is None:
        return DataView(counts, evidence, missing="data.json names no prepared set")
    if not Path(store_path).is_dir():
        return DataView(counts, evidence, missing="the prepared set is no longer on this machine")
    try:
        histograms, samples = _from_store(run, store_path)
    except RftError as error:
        return DataView(counts, evidence, missing=str(error))
    return DataView(counts, evidence, histograms, samples)


def _evidence(counts: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """How the format of each source was decided, in the words of the preparation."""
    for _, entry in counts:
        for source in entry.get("sources", []):
            if isinstance(source, dict) and source.get("evidence"):
                yield f"{Path(str(source.get('path', ''))).name}: {source['evidence']}"


def _from_store(run: RunRecord, store_path: str) -> tuple[list[Histogram], list[Sample]]:
    from rft.config.model import ModelConfig
    from rft.data.inspect import Inspector
    from rft.data.loader import Loader
    from rft.data.packed import open_store
    from rft.models.tokenizer import load_tokenizer

    store = open_store(store_path)
    lengths = store.lengths().tolist()
    histograms = [length_histogram(lengths)] if lengths else []
    data = run.config.get("data", {})
    if data.get("seq_len") and data.get("packing") != "none":
        seed = run.config.get("train", {}).get("seed", 0)
        keys = {key: data[key] for key in ("seq_len", "packing", "overlong")}
        loader = Loader(
            store, **keys, seed=seed, pad_id=0, shuffle="window" if data.get("shuffle") == "window" else True
        )
        histograms.append(fill_histogram(loader.plan(0).pack_tokens().tolist(), data["seq_len"]))
    final = run.path / "final"
    home = dict(run.config["model"])
    if (final / "tokenizer.json").is_file():
        home = {"path": str(final), "unicode": home.get("unicode", 16)}
    inspector = Inspector(store, load_tokenizer(ModelConfig(**home)))
    return histograms, samples_of(inspector, lengths)


def length_histogram(lengths: Sequence[int]) -> Histogram:
    """Documents by tokens, in 40 equal steps up to the 99.5th percentile; the last bar holds all longer ones."""
    top = sorted(lengths)[math.ceil(0.995 * len(lengths)) - 1]
    width = max(1, math.ceil(top / 40))
    num_bars = max(1, math.ceil(top / width))
    counts = [0] * num_bars
    for length in lengths:
        counts[min(num_bars - 1, max(0, length - 1) // width)] += 1
    longest = max(lengths)
    title = (
        "Documents by length" if longest <= num_bars * width else f"Documents by length (last bar: up to {longest:,})"
    )
    return Histogram("lengths", title, "tokens", [float(i * width) for i in range(num_bars + 1)], counts)


def fill_histogram(pack_tokens: Sequence[int], seq_len: int) -> Histogram:
    """Packs by how full they are, in percent. Whole range where any pack is under 90 % full, else 90 to 100 %."""
    shares = [100 * tokens / seq_len for tokens in pack_tokens]
    low = 90.0 if min(shares, default=0) >= 90 else 0.0
    num_bars = 40
    width = (100 - low) / num_bars
    counts = [0] * num_bars
    for share in shares:
        counts[min(num_bars - 1, int((share - low) / width))] += 1
    return Histogram("fill", "Packs by fill", "% of seq_len", [low + i * width for i in range(num_bars + 1)], counts)


def samples_of(inspector: Inspector, lengths: Sequence[int]) -> list[Sample]:
    """The documents at a quarter, half and nine tenths of the lengths, short to long."""
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    chosen = list(dict.fromkeys(by_length[min(len(by_length) - 1, int(q * len(by_length)))] for q in (0.25, 0.5, 0.9)))
    samples = []
    for index in chosen if by_length else []:
        document = inspector.document(index)
        kinds = [
            ("trained special" if token.trained else "special")
            if token.control
            else ("trained" if token.trained else "masked")
            for token in document.tokens
        ]
        caption = (
            f"{document.length:,} tokens, {document.trained:,} trained · {Path(document.file).name}:{document.line}"
        )
        spans, num_cut = cut([token.text for token in document.tokens], kinds)
        samples.append(Sample(caption, spans, num_cut))
    return samples


def cut(texts: Sequence[str], kinds: Sequence[str]) -> tuple[list[tuple[str, str]], int]:
    """Join neighbours of one kind (control tokens stay apart); long documents keep the start of what is trained in view."""
    start = 0
    if len(texts) > TOKENS_SHOWN:
        first = next((i for i, kind in enumerate(kinds) if kind.startswith("trained")), 0)
        start = max(0, min(first - TOKENS_OF_CONTEXT, len(texts) - TOKENS_SHOWN))
    end = min(len(texts), start + TOKENS_SHOWN)
    spans: list[tuple[str, str]] = [(f"… {start:,} tokens before\n", "masked")] if start else []
    for text, kind in zip(texts[start:end], kinds[start:end], strict=True):
        if spans and spans[-1][1] == kind and "special" not in kind:
            spans[-1] = (spans[-1][0] + text, kind)
        else:
            spans.append((text, kind))
    return spans, len(texts) - end
