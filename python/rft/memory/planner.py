"""Bytes and time of a step -> how many packs at once and which layers are computed again: the fastest that fits.

The byte model counts what each decoder layer keeps of a token by kind: inputs of norms and linears, q, k, v and the attention's
output, gate and up, and what of the MLP is made again in the backward pass by the fused kernels. It is held against what autograd
really saves in tests/memory/test_planner.py. Time is a roofline: the host has to launch every layer of a micro-batch, the device has to
compute it, and the slower of the two is what a micro-batch takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rft.models.describe import Facts

GIB = 2**30
Recompute = Literal["none", "selective", "full"] | int

RESERVED_BYTES = int(1.2 * GIB)
"""The CUDA context, cuBLAS workspaces and compiled kernels of a process."""
FRAGMENTATION = 0.06
"""Share of memory that the allocator cannot use."""
HOST_SECONDS_PER_LAYER = {True: 2.5e-3, False: 8e-3}
"""Launching one decoder layer forward and backward, with the fused blocks and with PEFT's own modules. The second is measured: SmolLM2-135M
with LoRA, 4,096 tokens a micro-batch, 15,000 tok/s on an H200, 30 layers (docs/design-notes.md)."""
EFFICIENCY = 0.6
"""Share of the vendor's peak that matmuls of a training step reach, attention and elementwise passes included."""
DEFAULT_PEAK = 100e12
"""FLOP/s assumed of a device that is not in the table."""
WORTH = 0.03
"""A choice that takes more memory has to be faster by this share."""
EVERY = (4, 3, 2)


@dataclass(frozen=True)
class Problem:
    """What is to be planned: one rank's part of a step."""

    facts: Facts
    state_bytes: int
    """Weights, gradients and optimizer states that this rank holds."""
    gathered_bytes: int
    """Weights of layers and head that are whole for a moment although sharded; 0 where they are not."""
    seq_len: int
    packs: int
    """Packs of a step on this rank; micro-batches divide it."""
    memory_bytes: int
    kernels: bool
    trained_in_full: bool
    itemsize: int
    chunk_rows: int
    """Rows of logits at a time."""
    peak_flops: float
    micro_batch: int | None = None
    """Given by the user."""
    recompute: Recompute | None = None
    """Given by the user."""
    can_recompute: bool = True


@dataclass(frozen=True)
class Choice:
    """One way to run the step."""

    micro_batch: int
    recompute: Recompute
    bytes: dict[str, int]
    """By category."""
    seconds: float
    """Of the whole step on this rank, as modelled."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Plan:
    """What was chosen and why, and what else there was."""

    chosen: Choice
    fits: bool
    budget_bytes: int
    alternatives: tuple[Choice, ...]

    def why_micro_batch(self) -> str:
        choice = self.chosen
        fuller = [
            a for a in self.alternatives if a.micro_batch > choice.micro_batch and a.recompute == choice.recompute
        ]
        if not self.fits:
            return f"the least; needs about {_gib(choice.total)} of {_gib(self.budget_bytes)} GiB all the same"
        if any(a.total > self.budget_bytes for a in fuller):
            return f"the most that fits: about {_gib(choice.total)} of {_gib(self.budget_bytes)} GiB"
        if fuller:
            return f"fills the GPU; more would gain under {WORTH:.0%} (about {_gib(choice.total)} GiB)"
        return f"the whole step at once takes about {_gib(choice.total)} of {_gib(self.budget_bytes)} GiB"

    def why_recompute(self) -> str:
        choice, own = self.chosen, self.chosen.recompute
        if own == "none":
            return f"about {_gib(choice.total)} of {_gib(self.budget_bytes)} GiB without it"
        plain = next(
            (a for a in self.alternatives if a.recompute == "none" and a.micro_batch == choice.micro_batch), None
        )
        without = f"; without it {_gib(plain.total)}" if plain else ""
        return f"about {_gib(choice.total)} of {_gib(self.budget_bytes)} GiB{without}"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"


def layer_bytes(problem: Problem, tokens: int) -> dict[str, int]:
    """What one decoder layer keeps for its backward pass, by kind."""
    f, size = problem.facts, problem.itemsize
    hidden, inner = f.hidden_size, f.intermediate_size
    q, kv = f.num_heads * f.head_size, (f.num_kv_heads or f.num_heads) * f.head_size
    of_mlp = 2 * inner  # gate and up
    if problem.trained_in_full:
        of_mlp += inner  # the input of down_proj
    if not problem.kernels:
        of_mlp = 4 * inner  # gate, activation(gate), up, and their product
    norms = (
        2 * hidden if problem.kernels or not problem.trained_in_full else 4 * hidden
    )  # what a trained weight multiplies
    return {
        "norms": tokens * norms * size,
        "linear inputs": tokens * 2 * hidden * size,
        "attention": tokens * (2 * q + 2 * kv) * size + tokens * f.num_heads * 4,
        "mlp": tokens * of_mlp * size,
    }


def bytes_of(problem: Problem, micro_batch: int, recompute: Recompute) -> dict[str, int]:
    """Peak bytes of a step by category."""
    f, tokens = problem.facts, micro_batch * problem.seq_len
    a_layer = sum(layer_bytes(problem, tokens).values())
    again = math.ceil(f.num_layers / _every(recompute)) if recompute != "none" else 0
    kept_input = tokens * f.hidden_size * problem.itemsize
    activations = (f.num_layers - again) * a_layer + again * kept_input
    # one layer's own backward: gradients of gate, up, their product and of the stream, and what is made again of it
    transient = tokens * (4 * f.intermediate_size + 4 * f.hidden_size) * problem.itemsize + (a_layer if again else 0)
    return {
        "weights, gradients, optimizer": problem.state_bytes + problem.gathered_bytes,
        "activations": activations + 3 * kept_input,
        "backward of a layer": transient,
        "loss": loss_bytes(problem, tokens),
        "reserved": RESERVED_BYTES,
    }


def loss_bytes(problem: Problem, tokens: int) -> int:
    """Logits of one chunk, sums of gradients in fp32, and the labelled rows."""
    f = problem.facts
    rows = min(problem.chunk_rows, tokens)
    logits = rows * f.vocab_size * (problem.itemsize if problem.kernels else 12)
    sums = f.vocab_size * f.hidden_size * 6 if problem.trained_in_full else rows * f.hidden_size * 4
    return logits + sums + 2 * tokens * f.hidden_size * problem.itemsize


def seconds_of(problem: Problem, micro_batch: int, recompute: Recompute) -> float:
    """Modelled time of the step: launching or computing, whichever is slower."""
    f, tokens = problem.facts, micro_batch * problem.seq_len
    flops = f.flops([problem.seq_len] * micro_batch)
    layers = (f.matmul_frozen + f.matmul_trained) - f.vocab_size * f.hidden_size
    share = 0.0 if recompute == "none" else 1 / _every(recompute)
    again = 2 * tokens * max(layers, 0) * share
    device = (flops + again) / (EFFICIENCY * problem.peak_flops)
    host = f.num_layers * HOST_SECONDS_PER_LAYER[problem.kernels] * (1 + share / 3)
    return max(device, host) * math.ceil(problem.packs / micro_batch)


def _every(recompute: Recompute) -> int:
    return recompute if isinstance(recompute, int) else 1


def choices(problem: Problem) -> Iterator[Choice]:
    """Every way to run the step, the least memory last."""
    batches = (
        [problem.micro_batch]
        if problem.micro_batch
        else [n for n in range(1, problem.packs + 1) if problem.packs % n == 0]
    )
    kinds: list[Recompute] = ["none", *(EVERY if problem.facts.num_layers > 1 else ()), "full"]
    if problem.recompute is not None:
        kinds = [problem.recompute]
    elif not problem.can_recompute:
        kinds = ["none"]
    for kind in kinds:
        for batch in reversed(batches):
            yield Choice(batch, kind, bytes_of(problem, batch, kind), seconds_of(problem, batch, kind))


def plan(problem: Problem) -> Plan:
    """The fastest that fits; among nearly as fast ones the smallest. Where nothing fits, the smallest, and `fits` is False."""
    budget = int(problem.memory_bytes * (1 - FRAGMENTATION))
    every = list(choices(problem))
    fitting = [c for c in every if c.total <= budget]
    if not fitting:
        return Plan(min(every, key=lambda c: c.total), False, budget, tuple(every))
    fastest = min(c.seconds for c in fitting)
    near = [c for c in fitting if c.seconds <= fastest * (1 + WORTH)]
    return Plan(min(near, key=lambda c: (c.total, c.seconds)), True, budget, tuple(every))
