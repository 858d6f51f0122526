"""`rft merge RUN`: an adapter into its base model, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rft import log
from rft.cli.arguments import find_run
from rft.errors import ConfigError
from rft.report.units import gib


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory or an adapter folder.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the model goes. Default RUN/merged.", show_default=False)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="The base model, where the adapter names another place.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["base", "bfloat16", "float16", "float32"], typer.Option("--dtype", help="Type of the result.")
    ] = "base",
    into: Annotated[
        Literal["auto", "original", "nf4", "int8"],
        typer.Option(
            "--into",
            help="The base's original weights, or what a base in so few bits stands for. auto: what the run was trained over.",
        ),
    ] = "auto",
) -> int:
    """Merge an adapter into its base model and write a model folder that transformers loads.

    The base is what the run was trained over (de-quantised NF4 or int8, else the original weights), the sum is made in fp32 and rounded once. Memory stays small whatever the model's size.
    """
    import torch

    from rft.checkpoint.merge import merge
    from rft.config.model import ModelConfig

    target = find_run(run, hub=False)
    if target.adapter is None:
        where = f"{target.model.path} is the whole model already" if target.kind == "run" else "it is a whole model"
        raise ConfigError(run, f"holds no adapter: {where}", wanted="a LoRA run or an adapter folder")
    out = out or (
        target.path / "merged" if target.kind == "run" else target.path.with_name(target.path.name + "-merged")
    )
    config = ModelConfig(path=base) if base else target.model
    held = target.model.base_weights if into == "auto" else into
    through = held if held in ("nf4", "int8") else None
    with _progress() as on_tensor:
        result = merge(
            target.adapter,
            out,
            base=config,
            dtype=None if dtype == "base" else getattr(torch, dtype),
            through=through,  # type: ignore[arg-type]
            on_tensor=on_tensor,
        )
    log.say("base", result.base)
    log.say("adapter", str(target.adapter))
    if result.untied:
        log.say("untied", "the head is a tensor of its own now: the adapter made it differ from the embedding")
    for note in result.notes:
        log.say("note", note)
    log.say(
        "merged",
        f"{result.num_tensors:,} tensors, {result.num_changed:,} of them changed · {gib(result.num_bytes)} in {result.seconds:.1f} s -> {result.out}",
    )
    return 0


def _progress() -> Any:
    """A context that gives the callback of `merge`: a live line on a terminal, nothing elsewhere."""
    from contextlib import contextmanager

    @contextmanager
    def live() -> Any:
        if not log.is_terminal() or log.verbosity() < 0:
            yield None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("merge"), BarColumn(20), MofNCompleteColumn(), TextColumn("tensors"))
        with Progress(*columns, console=log.console(), transient=True) as progress:
            task = progress.add_task("merge")
            yield lambda done, of, name: progress.update(task, completed=done, total=of)

    return live()
