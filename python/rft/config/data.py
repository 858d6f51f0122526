"""[data], [[data.train]] and [[data.eval]]: where rows come from and how they become packs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rft.config.table import Count, Table

REMOTE = ("s3", "gs", "az", "abfs", "abfss", "http", "https", "hf")
"""Schemes of paths that are fetched; `hf` is the hub."""

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "segments", "text", "tokens"]


class SourceConfig(Table):
    """One data set."""

    path: str
    """A file of rows (JSONL, JSON, CSV, TSV, Parquet, Arrow, or a .txt with a document a line; also .gz, .zst, .zip, .tar), a glob, or a directory of these; also `s3://`, `gs://`, `az://`, `https://` and `hf://datasets/owner/name`."""
    rows: str | None = None
    """`module:function` or `file.py:function`: called with the path of each file, gives its rows as dicts. Needs `data.allow_code`."""
    format: Format = "auto"
    """What a row is. `auto` decides from the first rows and shows the evidence."""
    fields: dict[str, str] = {}
    """Field names, ours = theirs: `prompt = "question"`, `completion = "answer"`, `messages = "chat"`."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Role names, theirs = ours: `asistant = "assistant"`."""
    weight: float = Field(1.0, gt=0, le=1000)
    """How often its rows are used in an epoch. Of a fraction, that share of the rows is chosen by `train.seed`."""
    max_rows: Count | None = None
    """Only the first rows of the data set, this many. The others are counted."""


class DataConfig(Table):
    """Data and how it is masked and packed."""

    train: list[SourceConfig] = Field(min_length=1)
    """Data sets to train on."""
    eval: list[SourceConfig] = []
    """Data sets for the held-out loss."""
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the training rows that is held out, chosen by content hash (so it is stable when rows are added)."""
    seq_len: int | None = Field(None, ge=2, le=2**24)
    """Tokens in a pack; at least 2, since the first of a pack has nothing before it that could predict it. Default: what the model was trained for, at most 8192."""
    packing: Literal["stream", "bfd", "even", "sequential", "none"] = "stream"
    """`stream` = best fit in the epoch's seeded order, unbiased; `bfd` = tightest, biased; `even` = every pack a like mix; `sequential` = rows in file order; `none` = a document a row."""
    overlong: Literal["split", "truncate", "drop", "error"] = "split"
    """What happens to documents longer than seq_len. Always counted."""
    shuffle: Literal["full", "window"] = "full"
    """`full` = over the whole set; `window` = within windows of 64 MiB of token ids, one behind the other, the data sets side by side: the order that streaming gives."""
    streaming: bool = False
    """Train while the data is prepared, with a few windows of it on disk at a time: for sets larger than the disk, or that should not be waited for. Needs `shuffle = "window"` and `train.max_steps`."""
    on_error: Literal["fail", "skip"] = "fail"
    """A bad row stops the run, or is counted and left out."""
    template: str = "model"
    """Chat template: `model` (the tokenizer's), a .jinja file, or a built-in name (`chatml`, `llama3`, `gemma`, `plain`)."""
    train_on: Literal["assistant", "last", "all"] | list[Literal["system", "user", "assistant", "tool"]] = "assistant"
    """Which turns carry a label: the assistant's, only the last of them, everything, or the roles named."""
    thinking: Literal["split", "keep", "template"] = "split"
    """Reasoning of earlier turns that the template drops: `split` makes a document of each turn, with its own reasoning; `keep` puts it back; `template` trains without it. Always counted."""
    end_of_turn: Literal["auto", "train", "mask"] = "auto"
    """The token that ends a trained turn: `auto` = as the template's generation tags say, and trained where it has none; `train` = also where the tags leave it out; `mask` = never."""
    dedup: bool = False
    """Drop documents whose tokens, labels and weights equal those of one before."""
    control_tokens: Literal["text", "allow"] = "text"
    """`text`: control tokens spelled inside a row's own text stay ordinary text. `allow`: they become control tokens."""
    cache_gb: float = Field(100.0, gt=0, le=1e6)
    """Disk that fetched files may take, in GB: those used longest ago are removed for new ones."""
    allow_code: bool = False
    """Whether `rows` of a data set may run code of yours."""
    store: str | None = None
    """Where prepared sets are kept. Default `$XDG_CACHE_HOME/rft/sets`."""
