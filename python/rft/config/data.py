"""[data], [[data.train]] and [[data.eval]]: where rows come from and how they become packs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rft.config.table import Table

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "segments", "text", "tokens"]


class SourceConfig(Table):
    """One data set."""

    path: str = Field(min_length=1)
    """A JSONL file (.jsonl, .json, .gz, .zst), a plain .txt file (a document a line), a glob, or a directory of these."""
    format: Format = "auto"
    """What a row is. `auto` decides from the first rows and shows the evidence."""
    fields: dict[str, str] = {}
    """Field names, ours = theirs: `prompt = "question"`, `completion = "answer"`, `messages = "chat"`."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Role names, theirs = ours: `asistant = "assistant"`."""


class DataConfig(Table):
    """Data and how it is masked and packed."""

    train: list[SourceConfig] = Field(min_length=1)
    """Data sets to train on."""
    eval: list[SourceConfig] = []
    """Data sets for the held-out loss."""
    eval_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the training rows that is held out, chosen by content hash (so it is stable when rows are added)."""
    seq_len: PositiveInt | None = None
    """Tokens in a pack. Default: what the model was trained for, at most 8192."""
    packing: Literal["stream", "bfd", "none"] = "stream"
    """`stream` = best fit over open bins in the epoch's seeded order, unbiased; `bfd` = tightest, biased; `none` = a document a row."""
    overlong: Literal["split", "truncate", "drop", "error"] = "split"
    """What happens to documents longer than seq_len. Always counted."""
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
    control_tokens: Literal["text", "allow"] = "text"
    """`text`: control tokens spelled inside a row's own text stay ordinary text. `allow`: they become control tokens."""
    store: str | None = None
    """Where prepared sets are kept. Default `$XDG_CACHE_HOME/rft/sets`."""
