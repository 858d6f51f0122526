"""Seconds of a training step on one rank: a roofline by kind of work. Products at the rate that a GPU reaches, passes at its bandwidth.

The host launches every layer of a micro-batch and the device computes it: the slower of the two is what a micro-batch takes. Copies and
collectives run beside the computation; what does not fit beside it is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rft.memory.devices import ACROSS, Rates
from rft.memory.plan import MemoryPlan, offloaded, recomputed
from rft.memory.sizes import Problem, layer_weight_bytes, moved_bytes, recomputed_layers, state_bytes

PLAIN_LAUNCH = 9.1e-3
"""Seconds of the host to launch one decoder layer forward and backward through PEFT's own modules: 4,096 tokens a micro-batch at 15,000
tok/s over 30 layers on an H200's host (SmolLM2-135M with LoRA, docs/design-notes.md)."""
BETWEEN_KERNELS = 0.375e-3
"""Seconds of a decoder layer, forward and backward, in which no kernel runs: 12 ms of a step of 433 of the 8B over FP8 on an H200
(docs/design-notes.md). Of every micro-batch, so that larger ones are faster."""
MOVING = 1.5e-3
"""Seconds of the host to send away and to fetch what a whole layer keeps: some 20 tensors, each with a copy and an event both ways."""
MLP_LAUNCHES = 0.4
"""Of a layer's launches, those of its MLP: each further piece makes them again, forward twice."""
BACKWARD_OF_ATTENTION = 2.5
"""Times the forward: five products instead of two."""
SMALL_HEADS = 0.9
"""Of the rate at head size 128, that at 64: 500 of 560 TFLOP/s."""
DISK = 1.1e9
"""Bytes/s of a local disk, read or written, where it was not measured."""
LEAST_FROZEN, LEAST_TRAINED = 1.07, 1.4
"""Times the loss's products where the fewest logits exist at one time: 27.0 of 25.2 ms, and 53.4 of 38.2 ms where the logits are made
twice (8192 x 4096 x 128256 on an H200, bench/kernels/linear_cross_entropy.py)."""
FASTEST_ATTENTION = ("fa4", "cudnn")


@dataclass(frozen=True)
class Machinery:
    """What the rank runs on."""

    rates: Rates
    within: float = 200e9
    """Bytes/s of collectives between its GPU and others of the node."""
    across: float = ACROSS
    per_node: int = 8
    disk: float = DISK


@dataclass(frozen=True)
class Times:
    """Seconds of one step by kind."""

    parts: dict[str, float]
    """Of the device, all micro-batches together. What runs beside is counted only as far as it sticks out."""
    launch: float
    """Of the host, all micro-batches together."""

    @property
    def step(self) -> float:
        device = sum(self.parts.values())
        return max(device, self.launch)

    @property
    def bound_by(self) -> str:
        return (
            "launches of the host"
            if self.launch > sum(self.parts.values())
            else max(self.parts, key=lambda k: self.parts[k])
        )


def seconds(problem: Problem, plan: MemoryPlan, machinery: Machinery) -> Times:
    """Modelled time of the step."""
    f, r = problem.facts, machinery.rates
    tokens = plan.micro_batch * problem.seq_len
    L = f.num_layers
    share = recomputed_layers(plan, L) / max(L, 1)
    head = f.vocab_size * f.hidden_size
    layers = max(0, f.matmul_frozen + f.matmul_trained - head)
    trained = max(0, f.matmul_trained - (head if problem.trained_in_full else 0))
    adapters = 0 if problem.trained_in_full else trained
    frozen = layers - trained
    parts: dict[str, float] = {}

    # linears: forward 2, gradient of the input 2, of the weight 2 more; again 2
    passes = 4.0 + 2.0 * share
    plain_rate = r.matmul if problem.itemsize == 2 else r.fp32
    quantised = frozen * max(0, L - 2) / max(L, 1) if problem.base == "fp8" and r.fp8 else 0.0
    linear = passes * tokens * (frozen - quantised) / plain_rate + passes * tokens * quantised / (r.fp8 or 1.0)
    if problem.trained_in_full:
        linear += (passes + 2) * tokens * trained / plain_rate
    mlp = 3 * f.hidden_size * f.intermediate_size * L
    if plan.tiled_mlp > 1:  # forward once more, within the backward
        linear += 2 * tokens * mlp / plain_rate
    parts["linears"] = linear
    # every further piece reads the weights again in each of its passes, and adds the fp32 gradients of trained ones up
    further = (plan.tiled_mlp - 1) * mlp
    in_passes = (3 + share) * problem.itemsize + (10 if problem.trained_in_full else 0)
    if further:
        parts["pieces"] = further * in_passes / r.memory

    length = min(problem.document_tokens or problem.seq_len, problem.seq_len)
    q = f.num_heads * f.head_size
    seen = sum(_seen(length, window) for window in (f.windows or (None,) * L))  # keys of a query, over all layers
    forward = 4.0 * q * tokens * seen
    attending = 1 + BACKWARD_OF_ATTENTION + (0.0 if plan.recompute == "selective" else share)
    rate = r.attention if problem.attention in FASTEST_ATTENTION else r.attention_plain
    rate *= 1.0 if f.head_size > 64 else SMALL_HEADS
    parts["attention"] = attending * forward / rate
    parts["passes"] = _elementwise_bytes(problem, tokens, share) * L / r.memory
    if adapters:
        parts["adapters"] = _adapter_bytes(problem, tokens, share) * L / r.memory
    if problem.base in ("nf4", "int8"):
        code = 0.52 if problem.base == "nf4" else 1.0
        read = (2 + share) * f.linear_frozen + (3 + share) * further + (mlp if further else 0)
        parts["dequantising"] = read * (code + problem.itemsize) / (0.88 * r.memory)
    labelled = tokens * problem.label_share
    products = (6.0 if problem.trained_in_full else 4.0) * labelled * head
    if plan.chunk_rows == "least":
        products *= LEAST_TRAINED if problem.trained_in_full else LEAST_FROZEN
    parts["loss"] = products / plain_rate + 3 * labelled * f.vocab_size * problem.itemsize / r.memory
    parts["between kernels"] = BETWEEN_KERNELS * L * (1 + share / 3)
    a_micro_batch = sum(parts.values())
    count = math.ceil(problem.packs / plan.micro_batch)
    if plan.offload != "none":
        parts["waiting for copies"] = _copies(problem, plan, machinery, parts, share)
    if plan.offload_weights != "none":
        fetching = layer_weight_bytes(problem) / r.host
        compute = sum(parts.values())
        forward = compute / (3 + share)
        parts["fetching weights"] = max(0.0, fetching - forward) + max(0.0, fetching - (compute - forward))
    if problem.shards > 1:
        parts["waiting for weights"] = _gathering(problem, machinery, a_micro_batch)
    parts = {name: value * count for name, value in parts.items()}

    states = state_bytes(problem)
    update = (
        f.num_trained / problem.shards * (4 + 2 * problem.master_itemsize + 2 * problem.moment_bytes + problem.itemsize)
    )
    parts["update"] = update / r.memory
    if plan.offload_states != "none":
        link = r.host if plan.offload_states == "cpu" else min(r.host, machinery.disk)
        parts["update"] += 2 * states["optimizer"] / link
    if problem.replicas > 1:
        transfer = _collective(2 * f.num_trained * 4, problem.replicas, machinery)
        parts["waiting for gradients"] = max(0.0, transfer - 0.6 * a_micro_batch)
    launch = r.launch if problem.base in ("bf16", "fp8") else r.launch_packed
    if plan.offload != "none":
        launch += (
            MOVING
            * len(offloaded(recomputed(plan.recompute, L, plan.recompute_layers), L, plan.offload_layers))
            / L
            * (1 - share)
        )
    pieces = MLP_LAUNCHES * ((plan.tiled_mlp - 1) * (4 + share) / 3 + 1 / 3) if further else 0.0
    a_layer = (launch if problem.kernels else PLAIN_LAUNCH) * (1 + share / 3 + pieces)
    return Times(parts, a_layer * L * count)


def _seen(length: float, window: int | None) -> float:
    """Keys that a query of a causal document sees on average."""
    if window is None or length <= window:
        return length / 2
    return (window * window / 2 + (length - window) * window) / length


def _elementwise_bytes(problem: Problem, tokens: int, share: float) -> float:
    """Read and written by norms, the activation, rope and the additions to the stream, forward and backward, of one layer."""
    f, size = problem.facts, problem.itemsize
    q, kv = f.num_heads * f.head_size, (f.num_kv_heads or f.num_heads) * f.head_size
    norms = (f.norm_width or 2 * f.hidden_size) + f.qk_norm_width
    forward = 2 * norms + 2 * 3 * f.hidden_size + 3 * f.intermediate_size + 2 * (q + kv)
    backward = 3 * norms + 2 * 3 * f.hidden_size + 6 * f.intermediate_size + 2 * (q + kv)
    more = 1.0 if problem.kernels else 2.5  # plain torch makes a pass of each operation
    quantising = 1.5 * (4 * f.hidden_size + 3 * f.intermediate_size) if problem.base == "fp8" else 0.0
    return tokens * size * ((forward * (1 + share) + backward) * more + quantising * 2)


def _adapter_bytes(problem: Problem, tokens: int, share: float) -> float:
    """Read and written for the low-rank branches of one layer: inputs once a group, outputs added to, gradients read."""
    f, size = problem.facts, problem.itemsize
    q, kv = f.num_heads * f.head_size, (f.num_kv_heads or f.num_heads) * f.head_size
    read = 2 * f.hidden_size + q + f.intermediate_size
    written = q + 2 * kv + f.hidden_size + 2 * f.intermediate_size + f.hidden_size
    forward, backward = read + 2 * written, written + 3 * read
    return tokens * size * ((forward * (1 + share) + backward) * (1.0 if problem.kernels else 2.5))


def _copies(problem: Problem, plan: MemoryPlan, machinery: Machinery, parts: dict[str, float], share: float) -> float:
    """What offloading sticks out of the computation: out while it goes forward, where the loss makes its gradients too, back in the rest."""
    moved, *_ = moved_bytes(problem, plan)
    link = machinery.rates.host if plan.offload == "cpu" else min(machinery.rates.host, machinery.disk)
    each_way = moved / link
    layers = sum(parts.values()) - parts["loss"]
    forward = layers / (3 + share)
    return max(0.0, each_way - forward - parts["loss"]) + max(0.0, each_way - (layers - forward))


def _gathering(problem: Problem, machinery: Machinery, computing: float) -> float:
    """Weights gathered forward and backward, gradients scattered; the first layer waits for nothing to compute beside."""
    f = problem.facts
    weights = f.num_parameters * problem.itemsize
    each = _collective(weights, problem.shards, machinery)
    gradients = _collective(f.num_trained * 4, problem.shards, machinery) if problem.trained_in_full else 0.0
    return max(0.0, 2 * each + gradients - computing) + 2 * each / max(f.num_layers, 1)


def _collective(count: float, ranks: int, machinery: Machinery) -> float:
    """Seconds to send `count` bytes round all ranks, each its share less its own."""
    link = machinery.within if ranks <= machinery.per_node else min(machinery.within, machinery.across)
    return count * (ranks - 1) / ranks / link
