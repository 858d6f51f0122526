"""A `Run` around a real (tiny) transformers model, built by training/setup.py, with hand-made packs in place of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rft.config.root import Config
from rft.data.batch import Batch
from rft.optim import Schedule
from rft.parallel.mesh import World
from rft.training.job import Job
from rft.training.run import Run
from rft.training.setup import (
    be_deterministic,
    build_graphs,
    build_optimizer,
    build_trainee,
    inspect_job,
    seed_everything,
    tell_compiled,
)
from rft.training.state import TrainState
from support.stub_run import StubLoader, join, pack

ONE_PROCESS = World(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), group=None)


def random_packs(
    count: int, *, documents: int = 3, seq_len: int = 48, vocabulary: int = 400, seed: int = 0
) -> list[Batch]:
    """Packs of a few documents of different lengths each, two thirds of the tokens labelled, filled up to seq_len."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    packs = []
    for _ in range(count):
        parts, room = [], seq_len
        for number in range(documents):
            length = min(room, draw(3, seq_len // documents + 1))
            ids = torch.randint(5, vocabulary, (length,), generator=generator).tolist()
            labelled = [draw(0, 3) > 0 for _ in ids]
            room -= length
            parts.append(pack(ids, labelled=labelled, size=length + (room if number == documents - 1 else 0)))
        whole = join(parts)
        packs.append(_as_one_pack(whole))
    return packs


def _as_one_pack(batch: Batch) -> Batch:
    from dataclasses import replace

    return replace(batch, pack_tokens=(batch.num_tokens,))


def split_documents(batch: Batch) -> list[Batch]:
    """The documents of a pack as packs of their own, as `packing = "none"` gives them."""
    ends = batch.cu_seqlens.tolist()
    parts = []
    for start, end in pairwise(ends):
        ids, labels = batch.input_ids[0, start:end].tolist(), batch.labels[0, start:end].tolist()
        if any(label != -100 for label in labels):
            parts.append(pack(ids, labelled=[False, *(label != -100 for label in labels[:-1])]))
    return parts


def model_config(model_dir: Path, tmp_path: Path, **tables: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_dir)},
        "adapter": {"name": "lora", "r": 4},
        "data": {"train": [{"path": "unused.jsonl"}], "seq_len": 48},
        "optim": {"lr": 1e-3, "schedule": {"name": "constant", "warmup_steps": 0}},
        "train": {"precision": "fp32", "accumulate": 1, "out": str(tmp_path / "run")},
    }
    for table, changes in tables.items():
        base[table] = {**base.get(table, {}), **changes}
    if base["adapter"].get("name") == "none":
        base["adapter"] = {"name": "none"}
    return Config.model_validate(base)


def model_job(
    model_dir: Path, tmp_path: Path, world: World = ONE_PROCESS, kernels: bool | None = None, **tables: dict[str, Any]
) -> Job:
    """Everything that is decided before weights are read. The model's folder holds a tokenizer too."""
    return inspect_job(model_config(model_dir, tmp_path, **tables), world, kernels=kernels)


def model_run(
    model_dir: Path,
    tmp_path: Path,
    packs: Sequence[Batch],
    *,
    eval_packs: Sequence[Batch] = (),
    packs_per_step: int = 1,
    world: World = ONE_PROCESS,
    kernels: bool | None = None,
    **tables: dict[str, Any],
) -> Run:
    """A run that is ready for its first step; the run directory exists."""
    job = model_job(model_dir, tmp_path, world, kernels, **tables)
    be_deterministic(job)
    seed_everything(job.config.train.seed)
    trainee = build_trainee(job)
    optimizer = build_optimizer(job, trainee)
    loader = StubLoader(packs)
    steps = loader.steps_in_epoch(0, packs_per_step)
    run_dir = Path(job.config.train.out or tmp_path)
    run_dir.mkdir(parents=True, exist_ok=True)
    run = Run(
        config=job.config,
        decisions=job.decisions,
        run_dir=run_dir,
        device=world.device,
        model=trainee.model,
        trainee=trainee,
        losses=trainee.losses,
        optimizer=optimizer,
        schedule=Schedule(job.config.optim.schedule, steps, optimizer.param_groups),
        loader=loader,  # type: ignore[arg-type]
        eval_loader=StubLoader(eval_packs) if eval_packs else None,  # type: ignore[arg-type]
        packs_per_step=packs_per_step,
        total_steps=steps,
        state=TrainState(packs_per_step=packs_per_step, total_steps=steps),
        rank=world.rank,
        world_size=world.world_size,
        data_group=world.group,
        source=job.source,
        tokenizer=job.tokenizer,
        receipts=job.receipts.to_json(),
    )
    if job.config.train.cuda_graph:
        run.graphs = build_graphs(job, run)
    if job.config.train.compile:
        tell_compiled(job, run)
    return run
