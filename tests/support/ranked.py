"""A real `Run` on a tiny Llama with hand-made packs, on one rank or several: everything of training but the data engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rft.checkpoint.hf import save_final
from rft.config.root import Config
from rft.data.batch import Batch
from rft.optim import Schedule
from rft.parallel.fsdp import whole
from rft.parallel.mesh import World
from rft.training.replan import Replanner
from rft.training.run import Run
from rft.training.setup import build_optimizer, build_trainee, inspect_job, seed_everything
from rft.training.state import TrainState, save_state
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.stub_run import join, pack
from support.tiny import tiny_llama

ALONE = World(0, 1, 0, torch.device("cpu"), None)
SEQ_LEN = 12
BO_27 = {"r": 8, "targets": ["q_proj", "v_proj"]}


def write_base(folder: Path, **options: Any) -> Path:
    """A tiny Llama with a tokenizer: hidden 64, 2 layers, head size 8, as many key and value heads as heads."""
    tiny_llama(folder, vocab_size=400, hidden=64, layers=2, heads=8, kv_heads=8, **options)
    return write_tiny_tokenizer(folder)


def packs(count: int, seed: int = 0) -> list[Batch]:
    """Documents of different lengths, each in a pack filled up to SEQ_LEN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, SEQ_LEN + 1, (count,), generator=generator).tolist()
    return [pack(torch.randint(5, 400, (n,), generator=generator).tolist(), size=SEQ_LEN) for n in lengths]


class RankLoader:
    """Deals packs as `rft.data.loader.Loader` does: every world-th to a rank, filler packs where they run out."""

    def __init__(self, dealt: list[Batch], world: World, micro_batch: int = 1):
        self.packs, self.world, self.micro_batch = dealt, world, micro_batch

    def plan(self, epoch: int) -> Any:
        return SimpleNamespace(hash=f"{len(self.packs)} packs, epoch {epoch}", num_packs=len(self.packs))

    def steps_in_epoch(self, epoch: int, packs_per_step: int) -> int:
        return -(-len(self.packs) // packs_per_step)

    def steps(self, epoch: int, packs_per_step: int, start_step: int = 0) -> Iterator[list[Batch]]:
        share = self.world.world_size * self.micro_batch
        for start in range(start_step * packs_per_step, len(self.packs), packs_per_step):
            step = self.packs[start : min(start + packs_per_step, len(self.packs))]
            step = step + [pack([], size=SEQ_LEN)] * (-len(step) % share)
            own = step[self.world.rank :: self.world.world_size]
            yield [join(own[i : i + self.micro_batch]) for i in range(0, len(own), self.micro_batch)]

    def close(self) -> None:
        pass


def make_run(
    base: Path, run_dir: Path, world: World = ALONE, *, lora: bool = True, mode: str = "replicate", num_packs: int = 12,
    packs_per_step: int = 4, **tables: dict[str, Any],
) -> Run:  # fmt: skip
    """Built by the real setup, on the model at `base`; tables change the config."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(base)},
        "adapter": {"name": "lora", **BO_27} if lora else {"name": "none"},
        "data": {"train": [{"path": "stub.jsonl"}], "seq_len": SEQ_LEN},
        "optim": {"lr": 1e-2, "weight_decay": 0.01, "schedule": {"name": "constant", "warmup_steps": 0}},
        "parallel": {"data": mode},
        "train": {"precision": "fp32", "micro_batch": 1, "out": str(run_dir)},
    }
    for table, changes in tables.items():
        values[table] = {**values.get(table, {}), **changes}
    seed_everything(0)
    job = inspect_job(Config.model_validate(values), world)
    trainee = build_trainee(job)
    optimizer = build_optimizer(job, trainee)
    seed_everything(world.rank)
    loader = RankLoader(packs(num_packs), world)
    total = loader.steps_in_epoch(0, packs_per_step)
    run_dir.mkdir(parents=True, exist_ok=True)
    return Run(
        config=job.config, decisions=job.decisions, run_dir=run_dir, device=world.device, model=trainee.model, trainee=trainee,
        losses=trainee.losses, optimizer=optimizer, schedule=Schedule(job.config.optim.schedule, total, optimizer.param_groups),
        loader=loader, packs_per_step=packs_per_step, total_steps=total,  # type: ignore[arg-type]
        state=TrainState(packs_per_step=packs_per_step, total_steps=total, plan_hash=loader.plan(0).hash),
        rank=world.rank, world_size=world.world_size, local_rank=world.local_rank, data_group=world.group,
        source=job.source, tokenizer=job.tokenizer, replanner=Replanner(job, run_dir),
    )  # fmt: skip


def steps(run: Run, count: int) -> list[dict[str, float]]:
    """Make `count` steps; per step this rank's share of the loss and the norm of the whole gradient."""
    made = []
    for micro_batches in run.loader.steps(0, run.packs_per_step, start_step=run.state.step_in_epoch):
        if len(made) == count:
            break
        result = train_step(run, [batch.to(run.device) for batch in micro_batches])
        run.state.step += 1
        run.state.step_in_epoch += 1
        made.append(
            {
                "loss": float(result.terms["next_token"]),
                "grad_norm": float(result.grad_norm),
                "tokens": result.counts["tokens"],
            }
        )
    return made


def gathered(run: Run) -> dict[str, torch.Tensor]:
    """Every trained tensor, whole."""
    return {name: whole(tensor).clone().cpu() for name, tensor in run.optimizer.named_masters().items()}


def moments(run: Run) -> dict[str, torch.Tensor]:
    """Every optimizer tensor, whole."""
    return {name: whole(tensor).clone().cpu() for name, tensor in run.optimizer.named_state().items()}


NUM_PACKS = 11  # steps of 4, 4 and 3 packs: the last one needs a filler on two ranks


def folder_of(root: Path, mode: str, lora: bool, ranks: int) -> Path:
    """Run directory of `whole_run`."""
    return root / f"{mode}-{'lora' if lora else 'full'}-{ranks}"


def final(run: Run) -> Path:
    """Write `final/`; every rank calls it."""
    save_final(
        run.run_dir / "final", model=run.model, source=run.source, tokenizer=run.tokenizer, config=run.config.model_dump(),
        masters=run.optimizer.named_masters(), rank=run.rank, world_size=run.world_size, group=run.data_group,
    )  # fmt: skip
    return run.run_dir / "final"


def whole_run(root: Path, mode: str, lora: bool, world: World = ALONE) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step, `final/`, on the model at `root`/base in fp32."""
    out = folder_of(root, mode, lora, world.world_size)
    run = make_run(root / "base", out, world, lora=lora, mode=mode, num_packs=NUM_PACKS)
    buffers = {name: buffer.cpu().clone() for name, buffer in run.model.named_buffers() if name.endswith("inv_freq")}
    made = steps(run, 2)
    save_state(run, "test")
    saved = {"model": gathered(run), "optimizer": moments(run)}
    made += steps(run, 1)
    final(run)
    large = [tensor for tensor in run.optimizer.named_masters().values() if tensor.numel() > 64]
    share = max(t.to_local().numel() / t.numel() if isinstance(t, DTensor) else 1.0 for t in large)
    return {"steps": made, "saved": saved, "end": gathered(run), "buffers": buffers, "largest share": share}
