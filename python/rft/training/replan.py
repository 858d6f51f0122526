"""A step that runs out of memory: what it is told with, and how it is made again under a cheaper plan.

Up to the optimizer's update a step changes gradients, random state and some buffers alone. These are put back, the next cheaper
plan is put onto the model, and the same micro-batches go through it again: nothing of the run's state is lost.
"""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rft import log
from rft.data.batch import Batch
from rft.errors import TrainingError
from rft.memory.plan import MemoryPlan, config_with
from rft.memory.recompute import why_not
from rft.models.backbone import decoder_layers
from rft.training.memory_modes import save_memory
from rft.training.rundir import write_run_files
from rft.training.state import StepStart
from rft.training.step import StepResult, train_step

if TYPE_CHECKING:
    from rft.training.job import Job
    from rft.training.run import Run

TILES = (4, 16)
"""Pieces of an MLP that are tried where no planner says how many."""


def ran_out(error: BaseException) -> bool:
    """Whether this is memory that ran out. torch raises a plain RuntimeError for the machine's own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def step_within_memory(run: Run, micro_batches: list[Batch]) -> StepResult:
    """`train_step`; where memory runs out in it, again under cheaper plans as `train.on_oom` says.

    Raises TrainingError naming what takes the memory, and what to change.
    """
    replan = run.config.train.on_oom == "replan" and run.replanner is not None
    while True:
        start = StepStart.capture(run.trainee) if replan else None
        try:
            return train_step(run, micro_batches)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
            words = " ".join(str(error).split())[:160]
        # outside the handler: the error's frames hold the activations of the step
        if run.replanner is None:
            raise out_of_memory(run, words, None)
        found = None if start is None or run.optimizer.updating else run.replanner.cheaper(run)
        if start is None or found is None:
            raise out_of_memory(run, words, run.replanner)
        run.optimizer.zero_grad()
        start.restore()
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.replanner.change(run, found, words)


def out_of_memory(run: Run, words: str, replanner: Replanner | None) -> TrainingError:
    """The error: largest categories as they are and as planned, and the next step to take."""
    sizes = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in categories(run)[:4])
    planned = replanner.planned if replanner else None
    if planned is not None and planned.chosen.plan == MemoryPlan.of(run.config):
        expected = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in planned.largest(3))
        sizes += f"; planned: {expected}"
    return TrainingError(
        "memory of the GPU" if run.device.type == "cuda" else "memory of this machine",
        f"ran out in step {run.state.step + 1}: {words}. Largest: {sizes}",
        do=f"{next_step(run, replanner)}; the same command goes on from the last checkpoint",
    )


def next_step(run: Run, replanner: Replanner | None) -> str:
    """The key to change, in words."""
    planned = replanner.planned if replanner else None
    untouched = planned is not None and planned.chosen.plan == MemoryPlan.of(run.config)
    if planned is not None and untouched and (change := planned.cheapest_change()):
        return change
    plan = None if replanner is None else replanner.cheaper(run, fixed=False)
    if plan is not None:
        return " and ".join(f"set {key}" for key in changes(MemoryPlan.of(run.config), plan))
    if run.micro_batch > 1:
        return f"set train.micro_batch below {run.micro_batch}"
    return "lower data.seq_len, or train an adapter instead of all weights"


def categories(run: Run) -> list[tuple[str, int]]:
    """What takes the memory, the largest first. On a CPU what activations take cannot be told."""
    parameters = list(run.model.parameters())
    sizes = {
        "weights": sum(_bytes(p) for p in (*parameters, *run.model.buffers())),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer states and masters": run.optimizer.state_bytes(),
    }
    if run.device.type == "cuda":
        known = sum(sizes.values())
        sizes["activations and workspace"] = max(0, torch.cuda.max_memory_allocated(run.device) - known)
        idle = torch.cuda.memory_reserved(run.device) - torch.cuda.memory_allocated(run.device)
        sizes["held by the allocator and unused"] = max(0, idle)
    return sorted(((n, s) for n, s in sizes.items() if s), key=lambda item: -item[1])


def _bytes(tensor: Any) -> int:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.numel() * part.element_size()


def changes(old: MemoryPlan, new: MemoryPlan) -> list[str]:
    """What differs, as the config spells it."""
    tables = {"chunk_rows": "loss", "micro_batch": "train", "in_backward": "optim"}
    found = []
    for field in dataclasses.fields(MemoryPlan):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            after = "all" if after is None else after
            shown = f'"{after}"' if isinstance(after, str) else str(after).lower()
            found.append(f"{tables.get(field.name, 'memory')}.{field.name} = {shown}")
    return found


@dataclass
class Replanner:
    """Finds the next cheaper plan of a run and puts it onto its model."""

    job: Job
    run_dir: Path

    @property
    def planned(self) -> Any:
        """What the planner expected; None where it did not plan (CPU)."""
        return getattr(self.job, "planned", None)

    def cheaper(self, run: Run, *, fixed: bool = True) -> MemoryPlan | None:
        """The next plan after the run's own, or None. fixed: keys that the config gives stay as they are."""
        now = MemoryPlan.of(run.config)
        if self.planned is not None:
            return self.planned.cheaper(now)
        decided = {decision.key for decision in self.job.decisions}
        for key, value in _ladder(now, list(decoder_layers(run.model))):
            where = "loss" if key == "chunk_rows" else "memory"
            if not fixed or f"{where}.{key}" in decided:
                return dataclasses.replace(now, **{key: value})
        return None

    def change(self, run: Run, plan: MemoryPlan, words: str) -> None:
        """Put it onto the model, into the config and the receipts, and say so."""
        told = ", ".join(changes(MemoryPlan.of(run.config), plan))
        run.config = config_with(run.config, plan)
        self.job = dataclasses.replace(self.job, config=config_with(self.job.config, plan))
        save_memory(self.job, run.trainee, list(decoder_layers(run.model)), self.run_dir)
        head: Any = run.trainee.head
        if hasattr(head, "set_chunk_rows"):
            head.set_chunk_rows(plan.chunk_rows)
        self.job.receipts.apply("replanned", 1, 1, f"step {run.state.step + 1} ran out of memory: {told}")
        run.receipts = self.job.receipts.to_json()
        log.warn(f"step {run.state.step + 1} ran out of memory ({words}); it is made again with {told}")
        if run.is_main and run.prepared is not None:
            write_run_files(run)


def _ladder(now: MemoryPlan, layers: list[torch.nn.Module]) -> list[tuple[str, Any]]:
    """Next values by key, the cheapest in time first, where no planner weighs them."""
    steps: list[tuple[str, Any]] = []
    if now.recompute_layers is not None:
        steps.append(("recompute_layers", None))
    if why_not(layers) is None:
        if now.recompute == "none" or isinstance(now.recompute, int):
            steps.append(("recompute", "selective"))
        elif now.recompute == "selective":
            steps.append(("recompute", "full"))
    steps += [("tiled_mlp", tiles) for tiles in TILES if tiles > now.tiled_mlp][:1]
    if now.chunk_rows != "least":
        steps.append(("chunk_rows", "least"))
    return steps
