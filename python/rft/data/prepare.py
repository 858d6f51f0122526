"""From data files to a prepared set: once a key, whoever asks first, with every row accounted for.

The key covers the content of the data, the tokenizer, the template and every option that changes what is written;
how documents become packs is a plan beside the set and no part of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft import __version__, log
from rft.config.data import DataConfig
from rft.data.folder import FORMAT_VERSION, SetFolder, default_root, shown_path
from rft.data.sources import Caches, SourceFile, expand, write_rows
from rft.data.streaming import Readers, StreamedSet, StreamLoader
from rft.data.template import PROBES, ChatTemplate, callback, load_template, native_difference, spelled_control_tokens
from rft.errors import ConfigError, DataError
from rft.models.tokenizer import TokenizerFiles
from rft.visible import visible
from rft.words import counted

if TYPE_CHECKING:
    from rft._native import Plan, Store
    from rft.data.loader import Loader

SPLIT = ("held out", "not held out")
"""Reasons of rows that are in the other set."""

_MANY_STRADDLING = 0.001
"""Share of tokens that straddle a mask's border above which it is said."""

SHARD_BYTES: int | None = None
"""Size of a shard's tokens; None = the extension's own. Part of every key."""

Progress = Callable[[int, int, int], None]
"""Bytes read, bytes in all, rows read."""


@dataclass(frozen=True)
class Prepared:
    """The sets of a run and what became of each row."""

    train: Store | StreamedSet
    eval: Store | None
    template: ChatTemplate | None
    """None: a base model without a template, and no row that needed one."""
    report: dict[str, Any]
    """{"train": part, "eval": part or None, "template": ...}; a part: read, kept, dropped {reason: rows}, tokens, ..."""

    @property
    def train_store(self) -> Store:
        """The training set, where it is prepared and no stream."""
        assert not isinstance(self.train, StreamedSet), "only training reads a stream"
        return self.train


def prepare(
    data: DataConfig,
    tokenizer: TokenizerFiles,
    *,
    rows: Iterable[dict[str, Any]] | None = None,
    progress: Progress | None = None,
    lead: bool = True,
    seed: int = 0,
    readers: Readers | None = None,
) -> Prepared:
    """The training set and, where the config asks for one, the held-out set; reused when nothing changed.

    rows: stands in for the path of the only `[[data.train]]`. lead: False in processes that shall wait for another one
    (local rank 0) to write. seed: of the choice of rows where a data set has a fractional weight. readers: who reads a stream; under data.streaming the
    training set is not prepared here, but made while it is read. Raises RftError kinds: rows, files and templates that are wrong, a full disk.
    """
    if data.streaming and readers is None:
        raise ConfigError(
            "data.streaming",
            "prepares the data while it is trained on, and this prepares it ahead",
            do="add --set data.streaming=false",
        )
    if data.streaming and rows is not None:
        raise ConfigError("data.streaming", "reads files, and rows= gives rows from Python", do="write them to a file")
    if data.eval and data.eval_fraction:
        raise ConfigError(
            "data", "both [[data.eval]] and eval_fraction say what is held out", do="leave out one of them"
        )
    folder = SetFolder(data.store or default_root())
    template = load_template(data.template, tokenizer)
    job = _Job(data, tokenizer, template, folder, progress or _nothing, lead, seed)
    train: Store | StreamedSet
    with _train_files(data, folder, rows, job.progress) as files:
        fraction = data.eval_fraction
        if data.streaming:
            assert readers is not None
            train, train_report = job.stream(files, readers)
        else:
            train, train_report = job.run("train", files, {"fraction": fraction, "part": "train"} if fraction else None)
        held, eval_report = None, None
        if fraction:
            held, eval_report = job.run("eval", files, {"fraction": fraction, "part": "eval"})
        elif data.eval:
            held, eval_report = job.run(
                "eval", expand(data.eval, "data.eval", _caches(data, folder, job.progress)), None
            )
    shown = None
    if template is not None:
        shown = {"name": template.name, "generation_tags": template.tagged}
    report = {"train": train_report, "eval": eval_report, "template": shown}
    missing = unmatched_roles(data.train_on, report)
    if missing and lead:
        log.warn(missing, do="check data.train_on, or map the rows' roles with [data.train.roles]")
    return Prepared(train, held, template, report)


@dataclass
class _Job:
    """What the training and the held-out set have in common."""

    data: DataConfig
    tokenizer: TokenizerFiles
    template: ChatTemplate | None
    folder: SetFolder
    progress: Progress
    lead: bool
    seed: int
    renderer: str | None = None
    """Decided once for both sets."""
    told_slow: bool = False
    told_older: bool = False

    def run(self, name: str, files: list[SourceFile], holdout: dict[str, Any] | None) -> tuple[Store, dict[str, Any]]:
        from rft import _native

        began = time.perf_counter()
        spec = self.spec(files, holdout)

        spec["renderer"] = self.choose_renderer()

        # Megabytes of tokenizer say nothing about a file.
        bare = {**spec, "tokenizer": {**spec["tokenizer"], "json": ""}, "template": None}

        def hash_of(source: dict[str, Any]) -> str:
            with self.folder.explain():
                return _native.source_hashes(json.dumps({**bare, "sources": [source]}))[0]

        hashes = self.folder.known_hashes(spec["sources"], hash_of)
        for source, xxh3 in zip(spec["sources"], hashes, strict=True):
            source["xxh3"] = xxh3
        text = json.dumps(spec, ensure_ascii=False)
        with self.folder.explain():
            key = _native.store_key(text)

        def write(path: Path) -> dict[str, Any]:
            render = None
            if self.template is not None and self.renderer == "callback":
                render = callback(self.template, self.tokenizer.special)
            made: dict[str, Any] = json.loads(_native.prepare(text, str(path), self.progress, render))
            return made

        store, made = self.folder.make(key, write, lead=self.lead)
        if made["written"]:
            self._say_what_was_there(made)
        counts = json.loads(store.manifest).get("counts", {})
        if made["written"] and "slow_tokenizer" in counts and not self.told_slow:
            self.told_slow = True
            reason = counts["slow_tokenizer"]
            log.warn(f"tokenizer: the tokenizers library does the work, many times slower, because {reason}")
        # A set is found again by what is in its files; they may have other names by now.
        for told, source in zip(counts.get("sources", []), spec["sources"], strict=False):
            told["path"] = source["path"]
        report = {**counts, "key": key, "store": store.path, "reused": not made["written"]}
        report["seconds"] = round(time.perf_counter() - began, 3)
        report["paths"] = list(dict.fromkeys(file.config.path for file in files))
        return store, report

    def stream(self, files: list[SourceFile], readers: Readers) -> tuple[StreamedSet, dict[str, Any]]:
        """The training set as a stream, of which nothing is made yet."""
        from rft import _native

        spec = self.spec(files, None)
        spec["renderer"] = self.choose_renderer()
        text = json.dumps(spec, ensure_ascii=False)
        with self.folder.explain():
            key = _native.stream_key(text)
        render = None
        if self.template is not None and self.renderer == "callback":
            render = callback(self.template, self.tokenizer.special)
        report = {
            "streamed": True,
            "key": key,
            "files": len(files),
            "bytes": sum(file.remote["bytes"] if file.remote else file.path.stat().st_size for file in files),
            "paths": list(dict.fromkeys(file.config.path for file in files)),
        }
        return StreamedSet(text, key, self.folder.root, readers, render), report

    def _say_what_was_there(self, made: dict[str, Any]) -> None:
        if made["resumed_rows"]:
            log.say(
                "data",
                f"went on behind {counted(made['resumed_rows'], 'row')} that an earlier run, which was stopped, had done",
            )
        older = [] if self.told_older else self.folder.older_formats()
        if older:
            self.told_older = True
            log.say(
                "data",
                f"{counted(len(older), 'prepared set')} of another format version in {shown_path(str(self.folder.root))}: "
                "prepared anew where needed (`rft data prune` removes them)",
            )

    def spec(self, files: list[SourceFile], holdout: dict[str, Any] | None) -> dict[str, Any]:
        tokenizer = self.tokenizer
        return {
            "format_version": FORMAT_VERSION,
            "sources": [file.spec() for file in files],
            "tokenizer": {
                "json": tokenizer.json,
                "special": tokenizer.special,
                "add_bos": tokenizer.add_bos,
                "eos_id": tokenizer.eos_id,
                "bos_id": tokenizer.bos_id,
                "vocab_size": tokenizer.vocab_size,
                "unicode": tokenizer.unicode,
            },
            "template": self.template.source if self.template else None,
            "renderer": "native",
            "train_on": self.data.train_on,
            "thinking": self.data.thinking,
            "end_of_turn": self.data.end_of_turn,
            "on_error": self.data.on_error,
            "control_tokens": self.data.control_tokens,
            "holdout": holdout,
            "dedup": self.data.dedup,
            "interleave": self.data.shuffle == "window",
            "seed": self.seed,
            "threads": 0,
            **({} if SHARD_BYTES is None else {"shard_bytes": SHARD_BYTES}),
        }

    def choose_renderer(self) -> str:
        """ "native", or "callback" where minijinja and jinja2 disagree on this template; said once."""
        if self.renderer is None:
            self.renderer = "native"
            if self.template is not None:
                self._check_template(self.template)
        return self.renderer

    def _check_template(self, template: ChatTemplate) -> None:
        # Two engines on the probe set take a while: the answer is kept for the same template and versions.
        subject = [
            template.source,
            self.tokenizer.special,
            PROBES,
            FORMAT_VERSION,
            __version__,
            package_version("jinja2"),
        ]
        difference = self.folder.known(
            "renderer", subject, lambda: native_difference(template, self.tokenizer.special) or ""
        )
        if difference:
            self.renderer = "callback"
            log.warn(f"template ({template.name}) is rendered by jinja2, about 10 times slower: {difference}")
        missing = spelled_control_tokens(template, self.tokenizer)
        if missing:
            log.warn(
                f"template ({template.name}): this model has no token for {', '.join(missing)}: spelled in pieces",
                do=f"model.add_tokens = {json.dumps(missing)} makes new ones",
            )


@contextmanager
def _train_files(
    data: DataConfig, folder: SetFolder, rows: Iterable[dict[str, Any]] | None, progress: Progress
) -> Iterator[list[SourceFile]]:
    """The files of [[data.train]]; rows from Python lie in one for as long as this lasts."""
    if rows is None:
        yield expand(data.train, "data.train", _caches(data, folder, progress), lazy=data.streaming)
        return
    if len(data.train) != 1:
        raise ConfigError("data.train", f"rows stand in for one data set, the config names {len(data.train)}")
    import tempfile

    with folder.explain(), tempfile.TemporaryDirectory(prefix="rows.tmp-", dir=folder.root) as temporary:
        path = Path(temporary) / "rows"
        if write_rows(rows, path) == 0:
            raise DataError("rows", "there are none")
        yield [SourceFile(path, data.train[0], name="rows")]


def _caches(data: DataConfig, folder: SetFolder, progress: Progress) -> Caches:
    return Caches(
        folder.root,
        limit=int(data.cache_gb * 1e9),
        code=data.allow_code,
        progress=lambda done, total: progress(done, total, 0),
    )


def _nothing(done: int, total: int, rows: int) -> None:
    """A place where Python looks at pending signals while the extension works."""


def report_with_plan(
    report: dict[str, Any], loader: Loader | StreamLoader, eval_loader: Loader | None = None
) -> dict[str, Any]:
    """`report` with the packs of the first epoch in each part: what data.json holds."""
    made = dict(report)
    for name, part in (("train", loader), ("eval", eval_loader)):
        if part is None or not report.get(name):
            continue
        if isinstance(part, StreamLoader):
            options = {"packing": part.packing, "seq_len": part.seq_len, "overlong": part.overlong}
            made[name] = {**report[name], "options": options}
        else:
            made[name] = {**report[name], "plan": plan_facts(part.plan(0), part)}
    return made


def plan_facts(plan: Plan, loader: Loader) -> dict[str, Any]:
    """Packs, fill and what became of documents over seq_len."""
    return {
        "packing": loader.packing,
        "seq_len": loader.seq_len,
        "overlong": loader.overlong,
        "packs": plan.num_packs,
        "fill": round(plan.fill, 6),
        "tokens": plan.num_tokens,
        "label_tokens": plan.num_label_tokens,
        **plan.counts,
    }


def describe(report: dict[str, Any]) -> list[str]:
    """A sentence for each set: rows, format, what was dropped and why, tokens, packs."""
    return [_sentence(name, report[name], report) for name in ("train", "eval") if report.get(name)]


def _sentence(name: str, part: dict[str, Any], report: dict[str, Any]) -> str:
    if part.get("streamed"):
        files = "1 file" if part["files"] == 1 else f"{part['files']:,} files"
        packs = (
            f"packs of {part['options']['seq_len']:,}" if part["options"]["packing"] != "none" else "a document a pack"
        )
        size = f"{files}, {part['bytes'] / 1e6:,.1f} MB"
        return f"{_names(part['paths'])}: {size} · streamed: prepared while training, shuffled in windows · {packs}"
    dropped = {reason: count for reason, count in part.get("dropped", {}).items() if count and reason not in SPLIT}
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(dropped.items()))
    lost = f"{sum(dropped.values()):,} dropped" + (f" ({reasons})" if reasons else "")
    elsewhere = part.get("dropped", {})
    if "not held out" in elsewhere:  # a share of the training rows: said to be these, and no more
        pieces = [f"held out: {part['kept']:,} of these rows, {lost}"]
    else:
        formats = "/".join(dict.fromkeys(source["format"] for source in part.get("sources", []) if source["read"]))
        template = (
            f", template: {report['template']['name']}" if report.get("template") and _uses_template(part) else ""
        )
        rows = f"{_names(part['paths'])}: {counted(part['read'], 'row')} ({formats}{template})"
        held = f", {elsewhere['held out']:,} held out" if elsewhere.get("held out") else ""
        pieces = [("held out: " if name == "eval" else "") + rows, f"{part['kept']:,} kept, {lost}{held}"]
    if part.get("repeats"):
        pieces.append(f"{counted(part['repeats'], 'repeat')} by weight")
    pieces.append(f"{_short(part['tokens'])} tokens, {share(part['trained_tokens'], part['tokens'])} trained")
    plan = part.get("plan")
    if plan:
        size = f" of {plan['seq_len']:,}" if plan["packing"] != "none" else ""
        pieces.append(f"{counted(plan['packs'], 'pack')}{size}, {100 * plan['fill']:.1f} % full")
        pieces += _overlong(plan)
    pieces.append("prepared before" if part["reused"] else f"{part['seconds']:.1f} s")
    return " · ".join(pieces)


def _overlong(plan: dict[str, Any]) -> list[str]:
    """What became of documents over seq_len, where there are any."""
    found = {
        "split": plan["split_documents"],
        "cut": plan["truncated_documents"],
        "left out": plan["dropped_documents"],
    }
    words = [f"{counted(count, 'document')} over seq_len {how}" for how, count in found.items() if count]
    if plan["unlabelled_tokens"]:
        words.append(f"{_short(plan['unlabelled_tokens'])} tokens of pieces without a label left out")
    return words


def _uses_template(part: dict[str, Any]) -> bool:
    return any(source["format"] not in ("text", "prompt_completion") for source in part.get("sources", []))


def _names(paths: list[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return shown_path(paths[0]) + more


def evidence(report: dict[str, Any]) -> list[str]:
    """Why each file was taken for what it is; files that look the same together."""
    files: dict[str, list[str]] = {}
    for name in ("train", "eval"):
        for source in (report.get(name) or {}).get("sources", []):
            named = files.setdefault(source["evidence"], [])
            if source["path"] not in named:
                named.append(source["path"])
    return [f"{_names([Path(path).name for path in paths])}: {text}" for text, paths in files.items()]


def remarks(report: dict[str, Any]) -> list[str]:
    """What else a user should know of how rows were read and masked: whatever was dropped, ignored or changed."""
    texts = []
    for name in ("train", "eval"):
        part = report.get(name)
        if part:
            texts += [f"{text} ({name} set)" if report.get("eval") else text for text in _remarks(part)]
    return texts


def _remarks(part: dict[str, Any]) -> list[str]:
    texts = []
    if part.get("empty_files"):
        texts.append(f"{counted(part['empty_files'], 'file')} without a row")
    straddling = part.get("straddling_tokens", 0)
    if straddling and straddling > _MANY_STRADDLING * part["tokens"]:
        rate = 100 * straddling / part["tokens"]
        texts.append(f"{counted(straddling, 'token')} across the border of trained text ({rate:.2f} %): trained")
    if part.get("control_token_rows"):
        texts.append(f"control tokens spelled in {counted(part['control_token_rows'], 'row')}: kept as ordinary text")
    if part.get("split_rows"):
        texts.append(
            f"{counted(part['split_rows'], 'chat')} became {counted(part['documents_of_split_rows'], 'document')}, one a turn: the template "
            'drops reasoning of earlier turns (data.thinking = "keep" or "template" leaves them whole)'
        )
    if part.get("reasoning_lost"):
        texts.append(
            f"not written by the template: {counted(part['reasoning_lost'], 'reasoning block')} of "
            f"{counted(part['reasoning_lost_rows'], 'row')}, trained without"
        )
    kept = part.get("mask_methods", {}).get("turns with their reasoning put back", 0)
    if kept:
        texts.append(f"reasoning of earlier turns, which the template drops, was put back in {counted(kept, 'row')}")
    if part.get("tools_ignored_rows"):
        texts.append(f"tools that the template does not write: in {counted(part['tools_ignored_rows'], 'row')}")
    if part.get("unended_rows"):
        texts.append(
            f"in {counted(part['unended_rows'], 'chat')} no control token ends what is trained on, so the model is not "
            "taught to stop there: the template writes none (data.template takes a copy of it that does)"
        )
    unused = part.get("unused_fields", {})
    if unused:
        named = sorted(unused, key=lambda field: (-unused[field], field))
        shown = ", ".join(f"{visible(field)} ({counted(unused[field], 'row')})" for field in named[:8])
        more = f" and {len(named) - 8} more" if len(named) > 8 else ""
        texts.append(f"fields of the rows that are not used: {shown}{more}")
    return texts


def unmatched_roles(train_on: Any, report: dict[str, Any]) -> str | None:
    """The roles that `train_on` names and no row has, in a sentence."""
    roles = (report.get("train") or {}).get("roles", {})
    missing = [role for role in train_on if role not in roles] if isinstance(train_on, list) and roles else []
    if not missing:
        return None
    return f"data.train_on names {', '.join(missing)}, and no row has such a message: the roles are {', '.join(roles)}"


def share(part: float, whole: float) -> str:
    """Per cent, or a dash for nothing of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _short(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
