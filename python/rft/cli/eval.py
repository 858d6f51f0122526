"""`rft eval RUN`: held-out loss by the code that trains."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from rft import log
from rft.cli.arguments import find_run, leave_stdout_to_json
from rft.errors import RftError


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory, an adapter or a model folder.", show_default=False)
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Rows to evaluate on. Default: the run's own held-out data.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> int:
    """Loss per labelled token on rows that were not trained on, by the same code as in training."""
    if as_json:
        leave_stdout_to_json()
    from rft.data.prepare import describe
    from rft.training.held_out import evaluate_target, source_settings

    target = find_run(run)
    try:
        with _Progress() as progress:
            result, report = evaluate_target(target, [str(path) for path in data or []], progress=progress.show)
    except RftError as error:
        if data and error.where.startswith("data.train."):  # where a config would name the files
            error.where = "rft eval --data"
        raise
    if as_json:
        document = {
            "run": run,
            "loss": result.loss,
            "perplexity": math.exp(min(result.loss, 700.0)),
            "label_tokens": result.label_tokens,
            "tokens": result.tokens,
            "seconds": result.seconds,
            "data": report,
        }
        log.output(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        return 0
    log.say("model", target.name)
    for sentence in describe({"train": report, "eval": None}):
        log.say("data", sentence + (" · read like the run's first source" if data and source_settings(target) else ""))
    log.say("loss", f"{result.loss:.4f} per label token · perplexity {math.exp(min(result.loss, 700.0)):,.2f}")
    speed = result.tokens / result.seconds if result.seconds else 0.0
    log.say(
        "tokens",
        f"{result.tokens:,}, of which {result.label_tokens:,} with a label · {result.seconds:.1f} s, {speed:,.0f} tok/s",
    )
    return 0


class _Progress:
    """A live line on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self._live: Any = None

    def __enter__(self) -> _Progress:
        if log.is_terminal() and log.verbosity() >= 0:
            from rich.live import Live
            from rich.text import Text

            self._live = Live(Text("loading"), console=log.console(), auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, done: int, total: int) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(f"evaluating {done:,}/{total:,}"), refresh=True)
