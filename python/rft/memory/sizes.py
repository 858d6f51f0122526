"""Bytes of a training step on one rank, by category, at the moment when there are most of them.

What a decoder layer keeps of a token is counted by kind and held against what autograd really saves (tests/memory/test_sizes.py). Peaks are
compared at three moments: the loss, the backward of the last layer (all activations are there) and that of the first (all gradients are).
T tokens of a micro-batch, H hidden, I inner width of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from rft.memory.plan import MemoryPlan, Recompute, offloaded, recomputed
from rft.models.facts import Facts

GIB = 2**30
BaseWeights = Literal["bf16", "fp8", "nf4", "int8"]

BITS_NF4 = 4 + 8 / 64 + 32 / (64 * 256)
"""Of a weight: its code, its share of a block's 8-bit scale, and of 256 blocks' fp32 scale."""
BITS_INT8 = 8
SLACK = 0.04
"""Share of what a step allocates that the allocator holds besides: blocks between tensors, of sizes that none asks for at the moment."""
RING = 2
"""Layers whose kept tensors are on the device when the forward pass is over and while it goes back, where most are offloaded: the one that is
worked on and the one before it. Of every second layer or fewer, one: the others stay by themselves. One more while the forward pass goes on (memory/offload.py, IN_FLIGHT_LAYERS)."""
STATE_BUCKETS = 3 * 256 * 2**20
"""Device bytes through which offloaded states pass (optim/home.py)."""
BUCKETS = 5 * 32 * 2**20
"""fp32 gradients in flight between replicas (parallel/replicate.py)."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned: one rank's part of a step. Everything but the plan is decided."""

    facts: Facts
    seq_len: int
    packs: int
    """Packs of a step on this rank; micro-batches divide it."""
    memory_bytes: int
    """That this rank may use, its CUDA context included."""
    kernels: bool
    """Whether the fused blocks and the loss kernel serve."""
    trained_in_full: bool
    itemsize: int
    """Bytes of a number of the computation."""
    master_itemsize: int = 4
    base: BaseWeights = "bf16"
    moment_bytes: float = 8.0
    """Optimizer states of a trained number."""
    attention: str = "varlen"
    shards: int = 1
    """Ranks that share weights, gradients and states; 1: each has all."""
    replicas: int = 1
    """Ranks that compute the same on other packs and sum their gradients."""
    label_share: float = 1.0
    """Of tokens, those that carry a label."""
    document_tokens: float | None = None
    """Length of the document that a token is in, on average; None: as long as a pack."""
    context_bytes: int = 600 * 2**20
    host_bytes: int | None = None
    """Of the machine's memory that may be pinned for this rank; None: as much as it takes."""
    graph: bool = False
    """Whether micro-batches are CUDA graphs: what these hold cannot be used by what is launched one by one, and the other way round."""


@dataclass(frozen=True)
class Sizes:
    """Peak bytes by category."""

    allocated: dict[str, int]
    """Of torch's allocator: what `torch.cuda.max_memory_allocated` shows is their sum."""
    beside: dict[str, int]
    """The process's context, and the allocator's slack."""
    host: int = 0
    """Pinned memory of the machine."""
    disk: int = 0
    moment: str = ""
    """When it is: the end of the forward pass ("forward"), the loss, the backward of the last layer ("backward"), of the first ("update"), or of the embedding."""
    moments: dict[str, dict[str, int]] = field(default_factory=dict)
    """`allocated` at each of them."""
    layer: dict[str, int] = field(default_factory=dict)
    """What one decoder layer keeps, by kind."""

    @property
    def peak(self) -> int:
        """Of torch's allocator."""
        return sum(self.allocated.values())

    @property
    def total(self) -> int:
        return self.peak + sum(self.beside.values())

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        both = {**self.allocated, **self.beside}
        return sorted(both.items(), key=lambda item: -item[1])[:count]


# ---- states: exact


def state_bytes(problem: Problem) -> dict[str, int]:
    """Weights, adapter, gradients and optimizer states that this rank holds between steps. Exact for AdamW."""
    f, size, kept = problem.facts, problem.itemsize, problem.master_itemsize
    adapter = 0 if problem.trained_in_full else f.num_trained
    frozen = f.num_parameters - (f.num_trained if problem.trained_in_full else 0)
    trained = f.num_trained
    base = frozen_bytes(problem, frozen)
    split = size != kept and problem.shards == 1  # FSDP2 keeps masters alone and gathers copies
    copy = size if split else kept
    masters = trained * kept if split else 0
    shares = problem.shards
    weights = base + (trained * copy if problem.trained_in_full else 0)
    return {
        "weights": weights // shares,
        "adapter": adapter * copy // shares,
        "gradients": trained * kept // shares,
        "optimizer": int(masters + trained * problem.moment_bytes) // shares,
    }


def frozen_bytes(problem: Problem, frozen: int) -> int:
    """Of the base's frozen weights, in the form in which they are held."""
    f, size = problem.facts, problem.itemsize
    if problem.base in ("nf4", "int8"):
        bits = BITS_NF4 if problem.base == "nf4" else BITS_INT8
        return int((frozen - f.linear_frozen) * size + f.linear_frozen * bits / 8)
    return frozen * size  # FP8 in both layouts takes the bytes of bf16


def layer_weight_bytes(problem: Problem) -> int:
    """Of the weights of all decoder layers, as they are computed with."""
    f = problem.facts
    ends = f.vocab_size * f.hidden_size * (1 if f.is_tied else 2)
    return max(0, f.num_parameters - ends) * problem.itemsize


# ---- what a layer keeps


def layer_bytes(problem: Problem, tokens: int) -> dict[str, int]:
    """What one decoder layer keeps for its backward pass, by kind."""
    f, size = problem.facts, problem.itemsize
    hidden, inner = f.hidden_size, f.intermediate_size
    q, kv = _widths(f)
    of_mlp = 2 * inner  # gate and up
    if problem.trained_in_full:
        of_mlp += inner  # the input of down_proj
    if not problem.kernels:
        of_mlp = 4 * inner  # gate, activation(gate), up, and their product
    norms = f.norm_width or 2 * hidden
    qk_norms = f.qk_norm_width
    if not problem.kernels and problem.trained_in_full:  # what a trained weight multiplies
        norms, qk_norms = 2 * norms, 2 * qk_norms
    return {
        "norms": tokens * (norms + qk_norms) * size,
        "linear inputs": tokens * 2 * hidden * size,
        "attention": tokens * (2 * q + 2 * kv) * size + tokens * f.num_heads * 4,
        "mlp": tokens * of_mlp * size,
        "adapters": tokens * f.layer_rank * size,
    }


def _widths(f: Facts) -> tuple[int, int]:
    return f.num_heads * f.head_size, (f.num_kv_heads or f.num_heads) * f.head_size


def kept_by_recomputed(problem: Problem, tokens: int, recompute: Recompute) -> dict[str, int]:
    """What a decoder layer keeps that is computed again."""
    f = problem.facts
    kept = {"layer inputs": tokens * f.hidden_size * problem.itemsize}
    if recompute == "selective":
        q, _ = _widths(f)
        kept["attention output"] = tokens * q * problem.itemsize + tokens * f.num_heads * 4
    return kept


def recomputed_layers(plan: MemoryPlan, num_layers: int) -> int:
    """How many decoder layers are computed again."""
    return len(recomputed(plan.recompute, num_layers, plan.recompute_layers))


def moved_bytes(problem: Problem, plan: MemoryPlan) -> tuple[int, int, int]:
    """What leaves the device in a forward pass, and of it what is there in the end, and while the pass goes on."""
    if plan.offload == "none":
        return 0, 0, 0
    tokens, L = plan.micro_batch * problem.seq_len, problem.facts.num_layers
    again = set(recomputed(plan.recompute, L, plan.recompute_layers))
    a_layer = sum(kept_by_layer(problem, tokens, plan.tiled_mlp).values())
    kept = sum(kept_by_recomputed(problem, tokens, plan.recompute).values())
    moved = [kept if i in again else a_layer for i in offloaded(sorted(again), L, plan.offload_layers)]
    ring = RING if 2 * len(moved) > L else RING - 1
    largest = sorted(moved, reverse=True)
    return sum(moved), sum(largest[:ring]), sum(largest[: ring + 1])


def kept_by_layer(problem: Problem, tokens: int, tiles: int) -> dict[str, int]:
    """`layer_bytes`; an MLP that is computed in pieces keeps nothing but its input."""
    layer = layer_bytes(problem, tokens)
    return {**layer, "mlp": 0} if tiles > 1 else layer


# ---- the step


def sizes(problem: Problem, plan: MemoryPlan) -> Sizes:
    """Peak of a step under a plan."""
    f, size = problem.facts, problem.itemsize
    tokens = plan.micro_batch * problem.seq_len
    states = state_bytes(problem)
    layer = kept_by_layer(problem, tokens, plan.tiled_mlp)
    a_layer, L = sum(layer.values()), f.num_layers
    again = recomputed_layers(plan, L)
    kept = sum(kept_by_recomputed(problem, tokens, plan.recompute).values())
    stream = tokens * f.hidden_size * size
    activations = (L - again) * a_layer + again * kept
    if not again and not problem.trained_in_full:
        activations -= stream  # below the first adapter nothing needs a gradient, so the first norm keeps no input
    moved, there, on_the_way = moved_bytes(problem, plan)
    activations -= moved - there
    host, disk = (moved, 0) if plan.offload == "cpu" else (min(moved, 2 * there), moved)
    if plan.offload_weights != "none":
        weights = layer_weight_bytes(problem)
        states["weights"] -= weights * max(0, L - RESIDENT) // max(L, 1)
        host += weights
    # input of the final norm; tables of cosines and sines, ids, labels and positions
    final = stream * (1 if problem.kernels or not problem.trained_in_full else 2)
    activations += final + tokens * (2 * f.head_size * size + 3 * 8)
    transient = backward_bytes(problem, tokens, plan.tiled_mlp, in_backward=plan.in_backward)
    if problem.base in ("nf4", "int8"):
        transient += f.largest_linear * size  # the buffer that weights are dequantised into
    sent = gathered_bytes(problem) if problem.shards > 1 else 0
    if problem.replicas > 1:
        sent += min(BUCKETS, states["gradients"])
    # the embedding's gradient is dense before it is added to that of a tied head, or cast; plain torch still holds the head's sum then
    dense = f.vocab_size * f.hidden_size * (size if problem.kernels else 2 * size)
    if problem.kernels and f.is_tied and size < problem.master_itemsize:  # cast before it is added to the head's
        dense += f.vocab_size * f.hidden_size * problem.master_itemsize
    embedding = dense if problem.trained_in_full else 0
    # plain torch scales the gradient of the head's weight into a new one, and casts that
    scaled = 0 if problem.kernels or not problem.trained_in_full else f.vocab_size * f.hidden_size * (4 + size % 4)
    made_again = a_layer - kept if again else 0
    # the layer whose backward comes first, while all activations are there
    last_again = made_again if L - 1 in recomputed(plan.recompute, L, plan.recompute_layers) else 0
    if plan.offload_states != "none":
        states, away = _offloaded_states(states)
        host += away if plan.offload_states == "cpu" else min(away, STATE_BUCKETS)
        disk += away if plan.offload_states == "disk" else 0
    gradients = states.pop("gradients") - _narrow(problem, plan)
    if plan.in_backward:
        gradients = min(
            gradients, max(f.vocab_size * f.hidden_size, f.hidden_size * f.intermediate_size) * problem.master_itemsize
        )
    before = gradients if plan.micro_batch < problem.packs else 0  # those of earlier micro-batches
    # forward, beside what a layer keeps: gate, up and their product where none of them is kept, else the product; the stream before and behind
    wide = 1 if plan.tiled_mlp == 1 and not last_again else 3
    of_layer = math.ceil(tokens / plan.tiled_mlp) * f.intermediate_size * wide * size + 2 * stream
    if problem.base in ("nf4", "int8"):
        of_layer += f.largest_linear * size
    moments = {
        "loss": {
            **states, "gradients": before, "activations": activations, "loss": loss_bytes(problem, tokens, plan.chunk_rows),
        },
        "backward": {
            **states, "gradients": before, "activations": activations + last_again, "backward of a layer": transient,
            "communication": sent, "loss": loss_gradient_bytes(problem, tokens) + scaled,
        },
        "update": {
            **states, "gradients": gradients - _not_there_yet(problem, plan), "activations": a_layer, "backward of a layer": transient,
            "communication": sent,
        },
        "embedding": {**states, "gradients": gradients, "activations": stream, "backward of a layer": embedding},
    }  # fmt: skip
    if moved:
        moments["forward"] = {**states, "gradients": before, "activations": activations + on_the_way - there + of_layer}
    moment, allocated = max(moments.items(), key=lambda item: sum(item[1].values()))
    allocated = {name: count for name, count in allocated.items() if count}
    slack = int(SLACK * (sum(allocated.values()) - states["weights"]))
    beside = {"slack": slack, "context": problem.context_bytes}
    if problem.graph:
        beside["graph"] = sum(allocated.values()) - sum(states.values())
    return Sizes(allocated, beside, host, disk, moment, moments, layer)


def _narrow(problem: Problem, plan: MemoryPlan) -> int:
    """Bytes that gradients save in the compute type: those that a step brings in one part (training/setup.py, `added_once`)."""
    alone = problem.shards == problem.replicas == 1 and plan.micro_batch >= problem.packs
    if not (problem.trained_in_full and alone and problem.itemsize < problem.master_itemsize):
        return 0
    head = problem.facts.vocab_size * problem.facts.hidden_size
    return max(0, problem.facts.num_trained - head) * (problem.master_itemsize - problem.itemsize)


def _not_there_yet(problem: Problem, plan: MemoryPlan) -> int:
    """Gradients that the backward of the first layer's MLP has still to bring: the embedding's and most of that layer's."""
    f = problem.facts
    if not problem.trained_in_full or plan.in_backward or plan.micro_batch < problem.packs:
        return 0
    table = f.vocab_size * f.hidden_size
    layer = (f.num_trained - table * (1 if f.is_tied else 2)) // max(f.num_layers, 1)
    numbers = (0 if f.is_tied else table) + max(0, layer - f.hidden_size * f.intermediate_size)
    size = problem.itemsize if _narrow(problem, plan) else problem.master_itemsize
    return numbers * size // problem.shards


def _offloaded_states(states: dict[str, int]) -> tuple[dict[str, int], int]:
    moved = max(0, states["optimizer"] - STATE_BUCKETS)
    return {**states, "optimizer": states["optimizer"] - moved}, moved


RESIDENT = 3
"""Layers whose weights are on the device at one time where they lie on the host: one that is worked on, one on its way there, one on its way home."""
UPDATED = 1 << 24
"""Numbers of a weight that a rule updates at one time, in four fp32 tensors (optim/rule.py)."""
LINEARS = 7
"""Of a decoder layer with a gated MLP: what its ranks are spread over."""


def backward_bytes(problem: Problem, tokens: int, tiles: int = 1, *, in_backward: bool = False) -> int:
    """What exists besides in the backward of one layer's MLP, its largest part: two of the wide ones, gradients of gate and up (elsewhere
    autograd frees as it goes). LoRA through the fused block: the stream's gradients before, within and behind, and `branch_parts_bytes`."""
    f, size = problem.facts, problem.itemsize
    fused = problem.kernels and not problem.trained_in_full
    wide = 2
    rows = math.ceil(tokens / tiles)
    again = 0 if tiles == 1 else 1 if fused else 3 if problem.kernels else 4  # of a piece, besides
    inner = rows * f.intermediate_size * (wide + again)
    if in_backward:  # each weight is updated as soon as its gradient is there
        inner = max(inner, UPDATED * 16 // size)
    streams = (3 if fused else 1) + max(0, round(f.norm_width / f.hidden_size) - 2)  # norms behind the MLP
    # pieces add up the gradients of their weights in fp32; of the piece that it is at, that of down is there while its activation goes back
    sums = f.hidden_size * f.intermediate_size * (3 * 4 + size) if tiles > 1 and problem.trained_in_full else 0
    return (inner + streams * tokens * f.hidden_size) * size + sums + branch_parts_bytes(problem, rows)


def branch_parts_bytes(problem: Problem, rows: int) -> int:
    """What the op that makes the gradients of gate's and up's branches has for itself: fp32, a share for every 256 columns (kernels/lora.py)."""
    f = problem.facts
    rank = f.layer_rank // LINEARS
    fused = problem.kernels and not problem.trained_in_full
    return rows * 2 * rank * math.ceil(f.intermediate_size / 256) * 4 if fused and rank <= 32 else 0


def loss_gradient_bytes(problem: Problem, tokens: int) -> int:
    """Gradients that the loss made in its forward pass and hands out in the backward one, where that of the weight takes another type."""
    f, size = problem.facts, problem.itemsize
    labelled = max(1, int(tokens * problem.label_share))
    held = (
        max(size, problem.master_itemsize) if problem.kernels else 4
    )  # autograd casts it to the type that it is summed in
    weight = f.vocab_size * f.hidden_size * held if problem.trained_in_full else 0
    return labelled * f.hidden_size * size + weight


def loss_bytes(problem: Problem, tokens: int, chunk_rows: int | Literal["least"]) -> int:
    """Logits of one chunk, what is summed in fp32, and gradients of the labelled rows (kernels/linear_cross_entropy.py)."""
    f, size = problem.facts, problem.itemsize
    labelled = max(1, int(tokens * problem.label_share))
    V, H = f.vocab_size, f.hidden_size
    gradient = labelled * H * size
    if not problem.kernels:
        rows = min(64 if chunk_rows == "least" else chunk_rows, labelled)
        sums = V * H * 8 if problem.trained_in_full else rows * H * 4
        return rows * V * 12 + sums + 2 * gradient
    if problem.trained_in_full and chunk_rows == "least":  # its backward (kernels/linear_logprob.py)
        columns = min(V, max(1024, min(8192, (128 << 20) // (labelled * size))))
        return V * H * size + labelled * columns * size + labelled * H * (4 + size) + gradient
    if problem.trained_in_full:
        assert chunk_rows != "least"
        rows = chunk_rows
        several = rows < labelled
        return min(rows, labelled) * V * size + V * H * (size + (4 if several else 0)) + gradient + rows * H * size
    if chunk_rows == "least":
        return 64 * 2**20 + gradient
    rows = min(chunk_rows, labelled)
    return rows * V * size + rows * H * (4 + size) + gradient


def gathered_bytes(problem: Problem) -> int:
    """Weights that are whole for a moment although sharded: two layers (one ahead), embedding and head, one layer's gradients."""
    f, size = problem.facts, problem.itemsize
    ends = f.vocab_size * f.hidden_size * (1 if f.is_tied else 2)
    a_layer = max(0, f.num_parameters - ends) // max(f.num_layers, 1)
    return (2 * a_layer + ends) * size + (a_layer * 4 if problem.trained_in_full else 0)
