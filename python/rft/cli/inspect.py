"""`rft inspect cfg.toml`: samples as the model will see them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft import log
from rft.cli.arguments import ConfigPath, Sets, leave_stdout_to_json
from rft.config.load import load_config
from rft.errors import ConfigError
from rft.words import counted

if TYPE_CHECKING:
    from rft.cli.prepare import PreparedData
    from rft.data.inspect import Inspector, Sample


def command(
    config: ConfigPath,
    sets: Sets = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="How many samples, evenly over the set.")] = 2,
    pack: Annotated[
        int | None, typer.Option("--pack", min=0, help="Also this pack of the first epoch, whole.", show_default=False)
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page instead of the text.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, with token ids.")] = False,
) -> None:
    """Show what is trained on: text, tokens, masks, document borders, lengths, and which rows were dropped and why."""
    if as_json:
        leave_stdout_to_json()
    checked = load_config(config, sets or [])
    from rft.cli.prepare import PreparedData
    from rft.data.inspect import Inspector, as_html
    from rft.data.inspect import as_json as to_json
    from rft.data.prepare import report_with_plan

    data = PreparedData(checked)
    loader = data.loader()
    inspector = Inspector(data.prepared.train, data.tokenizer, loader)
    packs = loader.plan(0).num_packs
    if pack is not None and pack >= packs:
        raise ConfigError("--pack", f"{pack}", wanted=f"0 to {packs - 1}: the first epoch has {counted(packs, 'pack')}")
    report = report_with_plan(data.prepared.report, loader, data.eval_loader())
    samples = inspector.spread(rows)
    in_pack = inspector.pack(pack) if pack is not None else []
    if as_json:
        log.output(to_json(report, samples, in_pack, inspector) + "\n")
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(as_html(f"rft inspect {config.name}", report, samples, in_pack, inspector), "utf-8")
        log.say("page", str(page))
    if not as_json and page is None:
        _show(report, samples, in_pack, inspector, data)


def _show(
    report: dict[str, Any], samples: list[Sample], in_pack: list[Sample], inspector: Inspector, data: PreparedData
) -> None:
    from rft.data.inspect import bars, dropped_lines, mask_methods
    from rft.data.prepare import describe, evidence, remarks

    for sentence in describe(report):
        log.say("data", sentence)
    for text in evidence(report):
        log.say("format", text)
    for remark in remarks(report):
        log.say("note", remark)
    if data.prepared.template is not None:
        log.say("template", data.prepared.template.name)
    log.say("masks", mask_methods(report))
    log.say("legend", "green: trained · dim: masked · reversed: control token" if log.colour() else "⟦trained⟧ masked")
    _show_samples(samples)
    if in_pack:
        log.line()
        log.line(
            f"pack: {counted(len(in_pack), 'document')}, {counted(sum(sample.length for sample in in_pack), 'token')}"
        )
        _show_samples(in_pack)
    log.line()
    log.line("documents by length in tokens")
    for text in bars(inspector.histogram()):
        log.line(text)
    for name in ("train", "eval"):
        for text in dropped_lines(report[name]) if report[name] else []:
            log.say("dropped", text)


def _show_samples(samples: list[Sample]) -> None:
    """Each under a rule, so that the border of every document is seen."""
    from rft.data.inspect import as_text

    console, colour = log.console(), log.colour()
    for sample in samples:
        console.rule(style="dim", characters="─")
        console.print(as_text(sample, colour=colour), soft_wrap=not log.is_terminal())
        console.print(sample.caption(), style="dim" if colour else None, soft_wrap=True)
