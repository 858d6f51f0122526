"""`rft prepare cfg.toml`: tokenise, mask and store the data ahead of time; the same code and the same sets as `rft train`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft import log
from rft.cli.arguments import ConfigPath, Sets, leave_stdout_to_json
from rft.config.load import load_config
from rft.config.root import Config

if TYPE_CHECKING:
    from rft.data.loader import Loader
    from rft.data.prepare import Prepared, Progress
    from rft.models.tokenizer import TokenizerFiles


def command(
    config: ConfigPath,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable: what data.json will hold.")] = False,
) -> None:
    """Tokenise, mask and store the data of a config, and say what became of every row.

    `rft train` finds the set and starts at once. Nothing is done again unless data, tokenizer, template or an option that
    changes the set has changed.
    """
    if as_json:
        leave_stdout_to_json()
    checked = load_config(config, sets or [])
    from rft.data.prepare import describe, evidence, remarks, report_with_plan

    data = PreparedData(checked)
    report = report_with_plan(data.prepared.report, data.loader(), data.eval_loader())
    if as_json:
        log.output(json.dumps(report, ensure_ascii=False, indent=2) + "\n")
        return
    for sentence in describe(report):
        log.say("data", sentence)
    for text in evidence(report):
        log.say("format", text)
    for remark in remarks(report):
        log.say("note", remark)
    for name in ("train", "eval"):
        if report[name]:
            log.say("store", report[name]["store"])


class PreparedData:
    """The sets of a config and loaders over them, without the model: for `rft prepare` and `rft inspect`."""

    def __init__(self, config: Config):
        from rft.data.prepare import prepare
        from rft.models.tokenizer import load_tokenizer

        self.config = with_seq_len(config)
        self.tokenizer: TokenizerFiles = load_tokenizer(config.model)
        with progress_bar() as progress:
            self.prepared: Prepared = prepare(config.data, self.tokenizer, progress=progress, seed=config.train.seed)

    def loader(self) -> Loader:
        """Of the training set, as one process sees it."""
        return self._loader(self.prepared.train, "train")

    def eval_loader(self) -> Loader | None:
        """Of the held-out set, if there is one."""
        return None if self.prepared.eval is None else self._loader(self.prepared.eval, "eval")

    def _loader(self, store: Any, name: str) -> Loader:
        from rft.data.loader import Loader

        data = self.config.data
        assert data.seq_len is not None
        return Loader(
            store,
            seq_len=data.seq_len,
            packing=data.packing,
            overlong=data.overlong,
            seed=self.config.train.seed,
            pad_id=self.tokenizer.pad_id,
            shuffle=name == "train",
            name=name,
        )


def with_seq_len(config: Config) -> Config:
    """`config` with data.seq_len decided; the model's config is read only where the file does not say it."""
    if config.data.seq_len is not None:
        return config
    from rft.models.positions import max_positions
    from rft.training.resolve import MAX_DEFAULT_SEQ_LEN

    target = config.model.rope.target_length
    seq_len = target or min(max_positions(config.model) or MAX_DEFAULT_SEQ_LEN, MAX_DEFAULT_SEQ_LEN)
    return config.model_copy(update={"data": config.data.model_copy(update={"seq_len": seq_len})})


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on a terminal, once there is something to wait for; nothing elsewhere."""
    if not log.is_terminal() or log.verbosity() < 0:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prepare "), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rows]:,} rows"))
    bar = Progress(*columns, TimeRemainingColumn(), console=log.console(), transient=True)
    task = bar.add_task("prepare", total=None, rows=0)

    def update(done: int, total: int, rows: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, rows=rows)

    try:
        yield update
    finally:
        bar.stop()
