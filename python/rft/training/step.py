"""One optimizer step. The loss is normalised here, by the counts of the whole step on all ranks, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rft.data.batch import Batch
from rft.losses import sum_terms
from rft.optim import clip_factor, grad_norm
from rft.parallel.apply import reduce_gradients
from rft.parallel.collectives import sum_over_ranks
from rft.training.run import Run
from rft.training.state import StepStart


@dataclass(frozen=True)
class StepResult:
    """What a step gave. Tensors stay on the device until they are logged."""

    terms: dict[str, Tensor]
    """This rank's share of each normalised term; the ranks' shares add up to the term."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping, the same on every rank."""
    counts: dict[str, float]
    """Over all micro-batches and ranks: the denominator of each term, and "tokens", "label_tokens", "flops"."""
    lr: float
    """Rate of this step, of the first parameter group."""


class GivenUp(Exception):
    """A signal arrived in a step that takes long; the step is given up, on every rank, and nothing of it is kept."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


def train_step(run: Run, micro_batches: list[Batch]) -> StepResult:
    """Forward and backward over this rank's micro-batches, then one update. The host waits for no device here."""
    # From the CPU's own counts, before any forward.
    counts = sum_over_ranks(sum_terms(count(run, batch) for batch in micro_batches), run.data_group)
    start = StepStart.capture(run.trainee) if run.signals and run.signals.long_steps else None
    shares = {term: torch.zeros((), device=run.device) for term in run.losses.terms}
    for batch in micro_batches:
        give_up_if_asked(run, start)
        for term, value in forward_backward(run, batch, counts, last=batch is micro_batches[-1]).items():
            shares[term] += value
    lr = run.schedule.lr
    if run.optimizer.in_backward:
        norm = run.optimizer.norm_in_backward()
        run.optimizer.step()
    else:
        norm = grad_norm(run.optimizer.parameters)
        run.optimizer.step(clip_factor(norm, run.config.train.max_grad_norm))
    run.schedule.step()
    run.optimizer.zero_grad()
    return StepResult(shares, norm, counts, lr)


def forward_backward(run: Run, batch: Batch, counts: dict[str, float], *, last: bool) -> dict[str, Tensor]:
    """Gradients of a micro-batch are added to `.grad`. Its normalised terms, detached. last: of the step."""
    if run.graphs is not None:
        return run.graphs(batch, counts)
    terms = run.trainee(batch)  # {"next_token": sum, ...}
    # A term that no token of the whole step has is 0, and so is its gradient.
    normalised = {term: value / (counts[term] or 1.0) for term, value in terms.items()}
    with reduce_gradients(run.trainee, last=last):
        sum(normalised.values()).backward()
    return {term: value.detach() for term, value in normalised.items()}


def count(run: Run, batch: Batch) -> dict[str, float]:
    """What a micro-batch adds to the step, from numbers that are on the CPU."""
    return {
        **run.losses.count_terms(batch),
        "tokens": float(batch.num_tokens),
        "label_tokens": float(batch.num_label_tokens),
        "flops": run.flops.of(batch) if run.flops else 0.0,
    }


def give_up_if_asked(run: Run, start: StepStart | None) -> None:
    """Where a step takes seconds, a signal does not wait for its end.

    start: random state at the beginning of the step, so that it is made again with the same dropout; None where steps are
    short: then this costs nothing.
    """
    if start is None or run.signals is None:
        return
    if number := run.signals.stop_requested(run.data_group):
        run.optimizer.zero_grad()
        start.restore()
        raise GivenUp(number)
