"""Decides every `auto` before anything is loaded, with the reason in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rft.config.adapter import LoraConfig
from rft.config.optim import DEFAULT_WARMUP_RATIO, state_bytes_per_number
from rft.config.root import Config
from rft.errors import ConfigError
from rft.memory import planner
from rft.memory.devices import find_gpu, rates_of
from rft.memory.plan import MemoryPlan
from rft.memory.sizes import GIB, Problem, state_bytes
from rft.memory.speed import Machinery
from rft.models.facts import Facts
from rft.models.rope import asked
from rft.training.decision import Decision
from rft.training.machine import Machine
from rft.words import counted

MAX_DEFAULT_SEQ_LEN = 8192
DEFAULT_TOKENS_PER_STEP = 32_768
REPLICATE_SHARE = 0.6
"""Replicas are chosen while weights, gradients and optimizer states take less than this of a GPU."""
DETERMINISTIC_MEAN_LENGTH = 2048
"""Deterministic attention backward costs 1 % of a step at this document length, a third of attention at 16,384 (H200, torch 2.11)."""
LR = {"lora": 2e-4, "none": 1e-5}
LION_SHARE = 0.2
"""Lion's rate over AdamW's: its updates are full steps, of which the paper takes a third to a tenth."""


@dataclass
class _Deciding:
    """Collects changed keys and their reasons."""

    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def set(self, key: str, value: Any, reason: str, *, shown: Decision | None = None) -> None:
        """shown: what the reader is told where `value` is a whole table."""
        table, name = key.split(".")
        self.changes.setdefault(table, {})[name] = value
        self.decisions = [d for d in self.decisions if d.key != key]  # decided again: the last word counts
        self.decisions.append(shown or Decision(key, value, reason))


def resolve_precision(config: Config, machine: Machine) -> tuple[Config, list[Decision]]:
    """Decide `train.precision`, which building the model needs. Raises ConfigError where the given one cannot be had here."""
    deciding = _Deciding()
    _decide_precision(deciding, config, machine)
    return _apply(config, deciding)


def resolve_rope(config: Config) -> tuple[Config, list[Decision]]:
    """Decide `model.rope.target_length`, which finding the model needs. Raises ConfigError where nothing says how long texts are."""
    deciding, rope = _Deciding(), config.model.rope
    if asked(rope) and rope.target_length is None:
        if config.data.seq_len is None:
            raise ConfigError(
                f'model.rope.method = "{rope.method}"',
                "nothing says for how long texts",
                do="set model.rope.target_length, or data.seq_len",
            )
        chosen = rope.model_copy(update={"target_length": config.data.seq_len})
        shown = Decision("model.rope.target_length", config.data.seq_len, "data.seq_len")
        deciding.set("model.rope", chosen, shown.reason, shown=shown)
    return _apply(config, deciding)


def tell_rope(config: Config, done: str) -> tuple[Config, list[Decision]]:
    """The kind of scaling that `auto` became. done: what finding the model did, "yarn: ..."."""
    deciding = _Deciding()
    if done and config.model.rope.method == "auto":
        kind = done.partition(":")[0]
        chosen = config.model.rope.model_copy(update={"method": kind})
        deciding.set("model.rope", chosen, done, shown=Decision("model.rope.method", kind, done))
    return _apply(config, deciding)


def resolve(
    config: Config,
    facts: Facts,
    machine: Machine,
    *,
    attention: tuple[str, str],
    chunk_rows: int,
    store: str,
    kernels: bool = False,
    isolates: bool = True,
    can_recompute: bool = True,
) -> tuple[Config, list[Decision]]:
    """Config without any `auto` that can be decided before the data is there, and why each became what it is.

    config: its precision is decided. attention: what serves the model here, and why. chunk_rows: rows of logits that are fast
    here. store: folder of prepared sets. kernels: whether ours serve. isolates: whether documents may share a row. What depends on the data follows in `resolve_for_data`. Raises ConfigError where a
    value that was given cannot be had.
    """
    assert config.train.precision != "auto", "resolve_precision() comes first"
    deciding = _Deciding()
    if config.model.attention == "auto":
        deciding.set("model.attention", *attention)
    _decide_adapter(deciding, config)
    _decide_seq_len(deciding, config, facts)
    if config.data.store is None:
        deciding.set("data.store", store, "default")
    if config.loss.chunk_rows == "auto":
        deciding.set("loss.chunk_rows", chunk_rows, f"logits of {facts.vocab_size:,} tokens for so many rows at a time")
    _decide_optim(deciding, config)
    _decide_parallel(deciding, config, facts, machine)
    _check_optim(deciding, config, machine)
    if config.train.accumulate is None and config.train.tokens_per_step is None:
        deciding.set("train.tokens_per_step", DEFAULT_TOKENS_PER_STEP, "default; at least one pack a rank")
    _decide_memory(deciding, config, facts, machine, kernels, isolates, can_recompute)
    if machine.kind == "cpu" and config.train.deterministic == "auto":
        deciding.set("train.deterministic", True, "a CPU always is")
    _check_micro_batch(deciding, config, facts, machine)
    _check_memory(deciding, config, facts, machine)
    if config.checkpoint.final is None:
        stops = config.train.early_stop is not None
        final, reason = ("best", "train.early_stop is set") if stops else ("last", "no train.early_stop")
        deciding.set("checkpoint.final", final, reason)
    return _apply(config, deciding)


def resolve_for_data(
    config: Config, machine: Machine, mean_length: float, is_moe: bool
) -> tuple[Config, list[Decision]]:
    """Decide what depends on the data. mean_length: of the document that a token is in, on average."""
    deciding = _Deciding()
    if config.train.deterministic == "auto":
        assert machine.kind == "cuda", machine
        length = f"a token's document has {mean_length:,.0f} tokens on average"
        if is_moe:
            deciding.set("train.deterministic", False, "mixture-of-experts models scatter with atomic additions")
        elif mean_length <= DETERMINISTIC_MEAN_LENGTH:
            deciding.set("train.deterministic", True, f"{length}: costs under 2 %")
        else:
            deciding.set("train.deterministic", False, f"{length}: would cost more than 2 %")
    return _apply(config, deciding)


def plan_packs_per_step(config: Config, world_size: int, mean_pack_tokens: float) -> tuple[int, int]:
    """(packs of one optimizer step over all ranks, micro-batches of it on each rank). The config is resolved.

    mean_pack_tokens: real tokens of a pack; used where packs are single documents of any length.
    """
    train, data = config.train, config.data
    assert isinstance(train.micro_batch, int), "resolve() decides train.micro_batch"
    assert data.seq_len is not None, "resolve() decides data.seq_len"
    unit = train.micro_batch * world_size
    if train.accumulate is not None:
        return train.accumulate * unit, train.accumulate
    assert train.tokens_per_step is not None, "resolve() decides train.tokens_per_step"
    pack_tokens = max(mean_pack_tokens, 1.0) if data.packing == "none" else float(data.seq_len)
    accumulate = max(1, math.ceil(math.ceil(train.tokens_per_step / pack_tokens) / unit))
    return accumulate * unit, accumulate


def plan_total_steps(config: Config, steps_in_epoch: Callable[[int], int]) -> int:
    """Optimizer steps of the run. steps_in_epoch(epoch): those of a whole epoch, its short last step among them.

    `max_steps` counts whatever `epochs` says; a fraction of an epoch is rounded up to whole steps.
    """
    if config.train.max_steps is not None:
        return config.train.max_steps
    whole = math.floor(config.train.epochs)
    total = sum(steps_in_epoch(epoch) for epoch in range(whole))
    rest = config.train.epochs - whole
    # 1e-9: a third of 3 steps is one step, not two
    return total + (math.ceil(rest * steps_in_epoch(whole) - 1e-9) if rest > 0 else 0)


# ---- single decisions


def _decide_precision(deciding: _Deciding, config: Config, machine: Machine) -> None:
    if config.train.precision == "auto":
        if machine.bf16:
            deciding.set("train.precision", "bf16", f"{machine.device_name} computes in bf16")
        else:
            deciding.set("train.precision", "fp32", f"{machine.device_name} has no bf16 arithmetic")
    elif config.train.precision == "bf16" and machine.kind == "cuda" and not machine.bf16:
        raise ConfigError(
            'train.precision = "bf16"',
            f"{machine.device_name} has no bf16 arithmetic",
            wanted="an Ampere or newer GPU",
            do='set train.precision = "fp32"',
        )
    if (
        deciding.changes.get("train", {}).get("precision", config.train.precision) == "fp32"
        and config.train.master == "bfloat16"
    ):
        raise ConfigError(
            'train.master = "bfloat16"',
            "the run computes in fp32, so its weights are kept in fp32",
            do='leave out train.master, or set train.precision = "bf16"',
        )


def _decide_adapter(deciding: _Deciding, config: Config) -> None:
    adapter = config.adapter
    if isinstance(adapter, LoraConfig) and adapter.alpha is None and adapter.path is None:
        deciding.set("adapter.alpha", 2.0 * adapter.r, "2 r")


def _decide_seq_len(deciding: _Deciding, config: Config, facts: Facts) -> None:
    given, most = config.data.seq_len, facts.max_positions
    target = config.model.rope.target_length
    if given is None and target is not None:
        deciding.set("data.seq_len", target, "model.rope.target_length")
    elif given is None:
        own = most or MAX_DEFAULT_SEQ_LEN
        reason = f"the model was trained for {own:,} positions" if most else "the model's config names no limit"
        deciding.set("data.seq_len", min(own, MAX_DEFAULT_SEQ_LEN), reason)
    elif most is not None and given > most:
        raise ConfigError(
            f"data.seq_len = {given}",
            f"the model was trained for {most:,} positions",
            wanted=f"at most {most}",
            do=f"set data.seq_len = {most} (longer documents are handled by data.overlong), or model.rope.target_length = {given} to "
            "scale its positions",
        )


def _check_micro_batch(deciding: _Deciding, config: Config, facts: Facts, machine: Machine) -> None:
    """Refuse what cannot be held whatever is done about activations: one layer's states and their gradients."""
    packs, seq_len = config.train.micro_batch, deciding.changes.get("data", {}).get("seq_len", config.data.seq_len)
    assert seq_len is not None, "decided before"
    if packs == "auto":
        return
    tokens = packs if config.data.packing == "none" else packs * seq_len  # a document has a token at least
    least = 2 * tokens * facts.hidden_size * (4 if config.train.precision == "fp32" else 2)
    if least > machine.memory_bytes or tokens >= 2**31:
        raise ConfigError(
            f"train.micro_batch = {packs}",
            f"{tokens:,} tokens at one time: the states of one layer and their gradients alone take "
            f"{least / 2**30:,.1f} GiB, and there are {machine.memory_bytes / 2**30:,.1f}",
            do="leave train.micro_batch out, and set how much a step is with train.tokens_per_step",
        )


def _check_memory(deciding: _Deciding, config: Config, facts: Facts, machine: Machine) -> None:
    """Refuse numbers of [memory], and of layers left out of FP8, that this model or device cannot mean."""
    memory, L = config.memory, facts.num_layers
    if isinstance(memory.recompute, int) and memory.recompute > L:
        raise ConfigError(
            f"memory.recompute = {memory.recompute}",
            f"every {memory.recompute}th of {counted(L, 'decoder layer')} is none but the first",
            wanted=f"at most {L}",
            do='set memory.recompute = "full", "selective" or "none", or a number of layers of which one is computed again',
        )
    for key in ("recompute_layers", "offload_layers"):
        given = getattr(memory, key)
        if isinstance(given, int) and given > L:
            raise ConfigError(
                f"memory.{key} = {given}",
                f"the model has {counted(L, 'decoder layer')}",
                wanted=f"at most {L}",
                do=f'lower memory.{key}, or set it to "all"',
            )
    keep = 1 if config.model.keep_ends is None else config.model.keep_ends
    if config.model.base_weights == "fp8" and 2 * keep >= L:
        raise ConfigError(
            'model.base_weights = "fp8"' if config.model.keep_ends is None else f"model.keep_ends = {keep}",
            f"{counted(keep, 'layer')} at each end stay in bf16, and the model has {counted(L, 'layer')}: none is left for FP8",
            do='set model.base_weights = "bf16"' + (", or model.keep_ends = 0" if keep else ""),
        )
    seq_len = deciding.changes.get("data", {}).get("seq_len", config.data.seq_len)
    packs = deciding.changes.get("train", {}).get("micro_batch", config.train.micro_batch)
    assert isinstance(packs, int), "decided before"
    assert seq_len is not None, "decided before"
    tokens = packs * seq_len
    if isinstance(memory.tiled_mlp, int) and memory.tiled_mlp > tokens:
        raise ConfigError(
            f"memory.tiled_mlp = {memory.tiled_mlp}",
            f"a micro-batch has {tokens:,} tokens, and a piece needs one at least",
            wanted="8 to 64 pieces for long texts; each costs launches of its own",
            do="leave out memory.tiled_mlp: a piece is then as large as there is room for",
        )
    for key in ("limit", "offload_keep"):
        given = getattr(memory, key)
        if machine.kind == "cuda" and given is not None and given * GIB > machine.memory_bytes:
            raise ConfigError(
                f"memory.{key} = {given:g}",
                f"the GPU has {machine.memory_bytes / GIB:.2f} GiB",
                wanted="GiB of this GPU's memory",
                do=f"lower memory.{key}, or leave it out",
            )


def _decide_optim(deciding: _Deciding, config: Config) -> None:
    optim = config.optim
    if optim.lr == "auto":
        kind = "LoRA" if config.adapter.name == "lora" else "full fine-tuning"
        share, whose = (LION_SHARE, " with Lion") if optim.name == "lion" else (1.0, "")
        deciding.set("optim.lr", LR[config.adapter.name] * share, f"default for {kind}{whose}")
    schedule = optim.schedule
    if schedule.warmup_steps is None and schedule.warmup_ratio is None:
        chosen = schedule.model_copy(update={"warmup_ratio": DEFAULT_WARMUP_RATIO})
        shown = Decision("optim.schedule.warmup_ratio", DEFAULT_WARMUP_RATIO, "default where no warm-up is given")
        deciding.set("optim.schedule", chosen, shown.reason, shown=shown)


def _check_optim(deciding: _Deciding, config: Config, machine: Machine) -> None:
    """Refuse what this number of ranks, or how they share the weights, cannot serve."""
    if config.optim.in_backward and machine.world_size > 1:
        raise ConfigError(
            "optim.in_backward = true",
            f"{machine.world_size} processes add their gradients up before any of them is applied",
            wanted="one process",
            do="leave out optim.in_backward",
        )
    if config.train.on_oom == "replan" and machine.world_size > 1:
        raise ConfigError(
            'train.on_oom = "replan"',
            f"one of {machine.world_size} processes that makes its step again would leave the others waiting in theirs",
            wanted="one process",
            do="leave out train.on_oom; `rft plan` says what fits",
        )
    if config.memory.offload_weights != "none" and machine.world_size > 1:
        raise ConfigError(
            'memory.offload_weights = "cpu"',
            f"{machine.world_size} processes would each fetch the whole model for every layer",
            wanted="one process",
            do='leave out memory.offload_weights, and set parallel.data = "shard"',
        )
    wide = config.adapter.name == "none" and config.train.precision == "bf16" and config.train.master == "float32"
    if config.memory.offload_weights != "none" and config.memory.offload_states == "none" and wide:
        raise ConfigError(
            'memory.offload_weights = "cpu"',
            "the fp32 masters would stay on the GPU: twice of what leaves it",
            do='set memory.offload_states = "cpu", or train.master = "bfloat16"',
        )
    mode = deciding.changes.get("parallel", {}).get("data", config.parallel.data)
    if config.memory.offload_states != "none" and mode == "shard" and machine.world_size > 1:
        raise ConfigError(
            f'memory.offload_states = "{config.memory.offload_states}"',
            "states of sharded weights are not offloaded: a rank's share of them is small already",
            do='leave out memory.offload_states, or set parallel.data = "replicate"',
        )


def _decide_parallel(deciding: _Deciding, config: Config, facts: Facts, machine: Machine) -> None:
    if config.parallel.data != "auto":
        return
    if machine.world_size == 1:
        deciding.set("parallel.data", "replicate", "one process")
        return
    needed = replica_bytes(config, facts)
    share = needed / machine.memory_bytes
    sizes = f"weights, gradients and optimizer states take {needed / 2**30:.1f} GiB, {share:.0%} of a rank's memory"
    fits = share < REPLICATE_SHARE
    if config.model.base_weights != "bf16":
        held = config.model.base_weights
        deciding.set("parallel.data", "replicate", f'model.base_weights = "{held}" is not sharded; {sizes}')
        return
    deciding.set("parallel.data", "replicate" if fits else "shard", sizes)


def _decide_memory(
    deciding: _Deciding, config: Config, facts: Facts, machine: Machine, kernels: bool, isolates: bool, can: bool
) -> None:
    """`train.micro_batch` and every `auto` of [memory], together: more packs at once need more memory."""
    train, memory = config.train, config.memory
    autos = [key for key in type(memory).model_fields if getattr(memory, key) == "auto"]
    if train.micro_batch != "auto" and not autos:
        return
    if machine.kind == "cpu":
        if train.micro_batch == "auto":
            deciding.set("train.micro_batch", 1, "a CPU gains nothing from more packs at once")
        for key in autos:
            value, reason = _ON_A_CPU[key]
            if key == "recompute" and memory.offload_weights != "none":
                value, reason = "full", "memory.offload_weights"
            deciding.set(f"memory.{key}", value, reason)
        return
    now, _ = _apply(config, deciding)
    one = _one_pack_reason(now, isolates)
    least = kernels and config.loss.chunk_rows == "auto"
    problem, given, machinery = memory_problem(
        now, facts, machine, kernels=kernels, can_recompute=can, one_pack=one is not None
    )
    planned = planner.plan(problem, replace(given, least_loss=least), machinery)
    if train.micro_batch == "auto":
        deciding.set("train.micro_batch", planned.chosen.plan.micro_batch, one or planned.why_micro_batch())
    for key in autos:
        value = getattr(planned.chosen.plan, key)
        deciding.set(f"memory.{key}", "all" if value is None else value, getattr(planned, f"why_{key}")())
    if planned.chosen.plan.chunk_rows != now.loss.chunk_rows:
        deciding.set("loss.chunk_rows", planned.chosen.plan.chunk_rows, planned.why_chunk_rows())


_ON_A_CPU: dict[str, tuple[Any, str]] = {
    "recompute": ("none", "a CPU run keeps everything"),
    "recompute_layers": ("all", "memory.recompute is none"),
    "offload": ("none", "a CPU run keeps everything where it is"),
    "offload_layers": ("all", "memory.offload is none"),
    "tiled_mlp": (1, "a CPU run computes whole MLPs"),
}


def _one_pack_reason(config: Config, isolates: bool) -> str | None:
    """Why a rank computes one pack at a time whatever fits, or None."""
    if not isolates:
        return "this model mixes documents of one row"
    if config.data.packing == "none":
        return "documents of different lengths at once would be filled up to the longest"
    if config.train.accumulate is not None:
        return "train.accumulate counts micro-batches: more packs in one would make the step larger"
    return None


def memory_problem(
    config: Config, facts: Facts, machine: Machine, *, kernels: bool, can_recompute: bool, one_pack: bool
) -> tuple[Problem, planner.Given, Machinery]:
    """The planner's question for one rank. What is "auto" in train.micro_batch and [memory] is to be chosen, all else is decided."""
    train, memory = config.train, config.memory
    assert config.data.seq_len is not None
    rows = config.loss.chunk_rows
    assert rows != "auto"
    given = train.micro_batch if isinstance(train.micro_batch, int) else 1 if one_pack else None
    if train.accumulate is not None:
        packs = train.accumulate * (given or 1)
    else:
        assert train.tokens_per_step is not None
        packs = math.ceil(math.ceil(train.tokens_per_step / config.data.seq_len) / machine.world_size)
        packs = max(1, packs) if given is None else math.ceil(max(1, packs) / given) * given
    rates = rates_of(machine.device_name)
    context = rates.context if machine.kind == "cuda" else 0
    limit = machine.memory_bytes
    if memory.limit is not None and int(memory.limit * GIB) < machine.memory_bytes - context:
        limit, context = int(memory.limit * GIB), 0  # of tensors: the context is beside them
    problem = Problem(
        facts=facts,
        seq_len=config.data.seq_len,
        packs=packs,
        memory_bytes=limit,
        kernels=kernels,
        context_bytes=context,
        host_bytes=machine.host_bytes,
        graph=train.cuda_graph,
        **_held(config),
        **_ranks(config, machine),
    )
    chosen: dict[str, Any] = {
        key: None if getattr(memory, key) == "auto" else getattr(memory, key)
        for key in (
            "recompute",
            "recompute_layers",
            "offload",
            "offload_layers",
            "tiled_mlp",
            "offload_states",
            "offload_weights",
        )
    }
    if train.cuda_graph:  # it holds neither recompute nor offload
        chosen |= {key: "none" for key in ("recompute", "offload") if chosen[key] is None}
    if facts.is_moe and chosen.get("tiled_mlp") is None:
        chosen["tiled_mlp"] = 1  # experts are no MLP whose rows are independent
    in_backward = bool(getattr(config.optim, "in_backward", False))
    question = planner.Given(
        micro_batch=given,
        chunk_rows=rows,
        can_recompute=can_recompute,
        in_backward=in_backward,
        **({"tiled_mlp": 1} | chosen),
    )
    return problem, question, machinery_of(machine, rates)


def machinery_of(machine: Machine, rates: Any = None) -> Machinery:
    """Rates and links of a rank's device."""
    gpu = find_gpu(machine.device_name)
    rates = rates if rates is not None else rates_of(machine.device_name)
    links = {} if gpu is None else {"within": gpu.within}
    return Machinery(rates, per_node=machine.per_node or machine.world_size, **links)


def planned_for(
    config: Config,
    facts: Facts,
    machine: Machine,
    *,
    kernels: bool,
    can_recompute: bool,
    isolates: bool,
) -> planner.Planned:
    """What the planner expects of a resolved config, beside what else there would be."""
    free = {"recompute": "auto", "recompute_layers": "auto"}
    auto = config.model_copy(update={"memory": config.memory.model_copy(update=free)})
    one = _one_pack_reason(config, isolates) is not None
    problem, given, machinery = memory_problem(
        auto, facts, machine, kernels=kernels, can_recompute=can_recompute, one_pack=one
    )
    return planner.planned(problem, MemoryPlan.of(config), given, machinery)


def _held(config: Config) -> dict[str, Any]:
    """How numbers are held, of a problem."""
    size = 4 if config.train.precision == "fp32" else 2
    return {
        "trained_in_full": config.adapter.name == "none",
        "itemsize": size,
        "master_itemsize": 4 if config.train.master == "float32" or size == 4 else 2,
        "base": config.model.base_weights,
        "moment_bytes": state_bytes_per_number(config.optim),
        "attention": config.model.attention,
    }


def _ranks(config: Config, machine: Machine) -> dict[str, Any]:
    shard = config.parallel.data == "shard" and machine.world_size > 1
    return {"shards": machine.world_size if shard else 1, "replicas": 1 if shard else machine.world_size}


def replica_bytes(config: Config, facts: Facts) -> int:
    """Weights, gradients and optimizer states of one unsharded rank. The config's precision is decided."""
    problem = Problem(facts, seq_len=1, packs=1, memory_bytes=0, kernels=False, **_held(config))
    return sum(state_bytes(problem).values())


def _apply(config: Config, deciding: _Deciding) -> tuple[Config, list[Decision]]:
    tables = {table: getattr(config, table).model_copy(update=update) for table, update in deciding.changes.items()}
    return config.model_copy(update=tables), deciding.decisions
