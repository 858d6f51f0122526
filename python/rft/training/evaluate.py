"""Held-out loss: total loss over total labelled tokens of all ranks, by the same trainee as in training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rft.losses import NEXT_TOKEN
from rft.models.finite import useless_numbers
from rft.parallel.apply import reshard
from rft.parallel.collectives import sum_over_ranks, sum_tensor_over_ranks
from rft.training.state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

    from rft.data.loader import Loader
    from rft.models.source import ModelSource
    from rft.training.run import Run
    from rft.training.signals import Signals
    from rft.training.trainee import Trainee


@dataclass
class HeldOut:
    """What an evaluation needs of a run, and nothing that trains: no optimizer, no masters."""

    trainee: Trainee
    eval_loader: Loader
    device: torch.device
    micro_batch: int
    world_size: int = 1
    data_group: dist.ProcessGroup | None = None
    signals: Signals | None = None
    state: TrainState = field(default_factory=TrainState)
    source: ModelSource | None = None


@dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out set."""

    loss: float
    label_tokens: int
    tokens: int
    seconds: float


class Interrupted(Exception):
    """A signal arrived during an evaluation; it is given up so that the state can be saved in time."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


def evaluate(run: Run | HeldOut, progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """Loss over the whole held-out set. Nothing but one running sum outlives a micro-batch, so memory does not grow with the set.

    progress(done, total) is called before the first micro-batch and after each. Raises Interrupted on every rank where a signal arrived.
    """
    assert run.eval_loader is not None, "evaluate() without a held-out set"
    start = time.perf_counter()
    loader = run.eval_loader
    packs_per_step = run.world_size * run.micro_batch
    total = loader.steps_in_epoch(0, packs_per_step)
    loss_sum = torch.zeros((), device=run.device, dtype=torch.float64)
    counts = {"weight": 0.0, "tokens": 0.0, "label_tokens": 0.0}
    if progress:
        progress(0, total)
    with evaluating(run.trainee):
        for done, micro_batches in enumerate(loader.steps(0, packs_per_step), 1):
            for batch in micro_batches:
                loss_sum += run.trainee(batch)[NEXT_TOKEN]
                counts["weight"] += batch.label_weight
                counts["tokens"] += batch.num_tokens
                counts["label_tokens"] += batch.num_label_tokens
            if run.signals and (number := run.signals.stop_requested(run.data_group)):
                raise Interrupted(number)
            if progress:
                progress(done, total)
    counts = sum_over_ranks(counts, run.data_group)
    loss = float(sum_tensor_over_ranks(loss_sum, run.data_group)) / counts["weight"]
    if not torch.isfinite(torch.tensor(loss)):
        raise useless_numbers(
            run.source,
            f"the held-out loss is {loss}",
            where=f"evaluation after step {run.state.step}",
            do='lower optim.lr, or use train.precision = "fp32"; the last checkpoint is intact'
            if run.state.step
            else 'use train.precision = "fp32": nothing has been trained yet',
        )
    return Evaluation(loss, int(counts["label_tokens"]), int(counts["tokens"]), time.perf_counter() - start)


@contextmanager
def evaluating(trainee: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; sharded parameters are shards again afterwards."""
    trainee.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        trainee.train()
        reshard(trainee)
