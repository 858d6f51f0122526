"""The lines above the progress of a run: machine, model, data, plan, what was applied and what was declined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from rft import __version__, log
from rft.config.adapter import LoraConfig
from rft.data.prepare import describe as describe_data
from rft.data.prepare import report_with_plan
from rft.data.streaming import StreamLoader
from rft.memory.planner import Planned
from rft.training.job import Job
from rft.training.live import duration
from rft.training.machine import Machine
from rft.training.run import Run
from rft.words import counted


def tell_machine(machine: Machine) -> None:
    log.line(f"rft {__version__} · {machine.describe()} · torch {torch.__version__}")


def tell_model(job: Job) -> None:
    facts, adapter = job.facts, job.config.adapter
    base = facts.num_parameters
    if isinstance(adapter, LoraConfig):
        how = (
            f"LoRA r {adapter.r} on {adapted_kinds(name for name, _ in job.model.named_parameters())}"
            if adapter.path is None
            else f"LoRA, going on from {adapter.path}"
        )
    else:
        how = "all of them"
    name = job.source.hub_id or Path(job.config.model.path).name
    log.say("model", f"{name} · {count(base)} parameters, {count(facts.num_trained)} trained ({how})")


def adapted_kinds(names: Iterable[str]) -> str:
    """What adapters sit on, by the names of their parameters: `7 kinds of linear`, `the embedding`, or both."""
    linears: set[str] = set()
    embeddings: set[str] = set()
    for name in names:
        for mark, kinds in ((".lora_A.", linears), (".lora_embedding_A.", embeddings)):
            if mark in name:
                kinds.add(name.partition(mark)[0].rpartition(".")[2])
    words = [f"{len(linears)} kind{'s' if len(linears) > 1 else ''} of linear"] if linears else []
    return " and ".join([*words, *(["the embedding"] if embeddings else [])]) or "nothing"


def tell_run(run: Run) -> None:
    """Data, plan and receipts of a run that is about to start."""
    assert run.prepared is not None
    for sentence in describe_data(report_with_plan(run.prepared.report, run.loader, run.eval_loader)):
        log.say("data", sentence)
    log.say("plan", plan_sentence(run))
    tell_few_steps(run)
    tell_larger_step(run)
    applied = [receipt_words(entry) for entry in run.receipts.get("applied", [])]
    if applied:
        log.say("applied", " · ".join(applied))
    for entry in run.receipts.get("declined", []):
        what = SPELLED.get(entry["what"], entry["what"])
        log.say("declined", f"{what}: {entry['why']}" + (f" ({entry['count']})" if entry["count"] > 1 else ""))


def plan_sentence(run: Run) -> str:
    config = run.config
    accumulate = run.packs_per_step // (run.micro_batch * run.world_size)
    ranks = f" x {run.world_size} ranks" if run.world_size > 1 else ""
    micro = f" x {run.micro_batch}" if run.micro_batch > 1 else ""
    pack = "a document" if config.data.packing == "none" else f"{config.data.seq_len:,} tokens"
    parts = [f"{pack}{micro} x {accumulate}{ranks} a step", counted(run.total_steps, "step")]
    if run.state.step:
        parts.append(f"{run.total_steps - run.state.step:,} left")
    masters = "fp32 masters" if config.train.master == "float32" else "bf16 masters"
    parts.append("bf16 with " + masters if config.train.precision == "bf16" else "fp32")
    if run.world_size > 1:
        parts.append("sharded" if config.parallel.data == "shard" else "replicated")
    schedule = config.optim.schedule
    parts.append(f"{schedule.name} from {config.optim.lr:g}, warm-up {run.schedule.warmup}")
    if run.planned is not None:
        parts += expected(run.planned, run.world_size, run.total_steps - run.state.step)
    return " · ".join(parts)


def expected(planned: Planned, world_size: int, steps: int) -> list[str]:
    """Memory, speed and time of so many steps, as planned."""
    plan, chosen = planned.chosen.plan, planned.chosen
    every = f"every {plan.recompute}" if isinstance(plan.recompute, int) else plan.recompute
    saved = [f"recompute {every}{_of(plan.recompute_layers)}"]
    if plan.offload != "none":
        saved.append(f"offload to {plan.offload}{_of(plan.offload_layers)}")
    if plan.tiled_mlp > 1:
        saved.append(f"MLPs in {plan.tiled_mlp} tiles")
    return [
        *saved,
        f"peak {chosen.sizes.peak / 2**30:.1f} GiB of {planned.budget / 2**30:.0f}",
        f"about {planned.tokens_per_second * world_size:,.0f} tok/s, {duration(steps * chosen.seconds)}",
    ]


def _of(layers: int | None) -> str:
    return "" if layers is None else f" of {counted(layers, 'layer')}"


FEW_STEPS = 10
"""With fewer a learning rate has hardly warmed up before it is gone again."""


def tell_few_steps(run: Run) -> None:
    """Small data and the default step: a run that is over before it began, which somebody's first try often is."""
    train = run.config.train
    left_to_us = any(decision.key == "train.tokens_per_step" for decision in run.decisions)
    if run.total_steps >= FEW_STEPS or train.max_steps is not None or not left_to_us or run.state.step:
        return
    assert not isinstance(run.loader, StreamLoader), "data.streaming needs train.max_steps"
    tokens = run.loader.plan(0).num_tokens
    log.warn(
        f"the whole run is {counted(run.total_steps, 'step')}: a step takes up to {train.tokens_per_step:,} tokens, and an epoch has {tokens:,}",
        do=f"set train.tokens_per_step = {max(run.config.data.seq_len or 0, tokens // 50)} or so, or more train.epochs",
    )


def tell_larger_step(run: Run) -> None:
    """A step takes at least one micro-batch of every rank, whatever train.tokens_per_step says."""
    train, data = run.config.train, run.config.data
    given = train.tokens_per_step is not None and not any(d.key == "train.tokens_per_step" for d in run.decisions)
    if not given or train.accumulate is not None or data.packing == "none" or data.seq_len is None or run.state.step:
        return
    taken = run.packs_per_step * data.seq_len
    if taken >= 2 * (train.tokens_per_step or 1):
        log.warn(
            f"a step takes up to {taken:,} tokens, not the {train.tokens_per_step:,} of train.tokens_per_step: {counted(run.micro_batch, 'pack')} of "
            f"{data.seq_len:,} on each of {counted(run.world_size, 'rank')} is the least",
            do="set data.seq_len or train.micro_batch lower, or take fewer processes",
        )


SPELLED = {"rms_norm": "RMSNorm", "rms_norm kernel": "RMSNorm kernel", "lora": "LoRA", "lora linear": "fused LoRA"}
"""Receipts' names of things as a reader knows them."""


def receipt_words(entry: dict[str, Any]) -> str:
    """`RMSNorm 65/65`, or the bare name of what is done once."""
    what = SPELLED.get(entry["what"], entry["what"])
    return what if entry["of"] == 1 else f"{what} {entry['count']}/{entry['of']}"


def tell_decisions(decisions: Sequence[Any]) -> None:
    """Every `auto` and why, for run.log and -v."""
    for decision in decisions:
        log.detail("auto", f"{decision.key} = {decision.value}: {decision.reason}")


def tell_end(run: Run, seconds: float) -> None:
    names = ["final/", "report.html", "metrics.jsonl", "receipts.json", "data.json"]
    there = [name for name in names if (run.run_dir / name).exists()]
    log.line(f"done in {duration(seconds)}. In {shown(run.run_dir)}: {', '.join(there)}")


def shown(path: Path) -> str:
    """A path as short as it can be."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def count(number: int) -> str:
    """8.03 B, 41.9 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number / size < 100 else f"{number / size:.1f} {unit}"
    return str(number)
