"""What does not go together, as tables: rules over several keys, values refused with a reason, words of other programs.

Validation (`load.py`), the reference page (docs/config.md) and the tests read the same tables. What depends on the machine
or the model is decided later, by `rft.training.resolve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rft.config.adapter import LoraConfig
from rft.config.optim import AdamW8bitConfig, WsdSchedule
from rft.config.root import Config


@dataclass(frozen=True)
class Rule:
    """A combination that is refused.

    keys: the keys it is about, the first named in the error. when: true where the config breaks it. message: what is wrong.
    do: what to write instead. example: the smallest tables that break it (merged into a minimal config by the tests).
    """

    name: str
    keys: tuple[str, ...]
    when: Callable[[Config], bool]
    message: str
    do: str
    example: dict[str, Any]


def is_set(table: BaseModel, key: str) -> bool:
    """Whether the user gave the key a value: defaults never conflict."""
    return key in table.model_fields_set and getattr(table, key) is not None


def has_held_out(config: Config) -> bool:
    """Whether there is data for the held-out loss."""
    return bool(config.data.eval) or config.data.eval_fraction > 0


def uses_disk(config: Config) -> bool:
    """Whether anything may go to `memory.offload_dir`."""
    return "disk" in (config.memory.offload, config.memory.offload_states)


def _adapter_shape_given(config: Config) -> bool:
    adapter = config.adapter
    shape = ("r", "alpha", "targets", "rslora", "dora", "init", "bias", "modules_to_save")
    return isinstance(adapter, LoraConfig) and adapter.path is not None and any(is_set(adapter, key) for key in shape)


def _init_needs_whole_weights(config: Config) -> bool:
    return (
        isinstance(config.adapter, LoraConfig)
        and config.adapter.init in ("pissa", "olora")
        and config.parallel.data == "shard"
    )


def _phases_too_long(config: Config) -> bool:
    schedule = config.optim.schedule
    return isinstance(schedule, WsdSchedule) and (schedule.warmup_ratio or 0.0) + schedule.decay_ratio > 1


_NO_HELD_OUT_DO = "add data.eval_fraction = 0.05 or an [[data.eval]] table, or leave the key out"

RULES: tuple[Rule, ...] = (
    Rule(
        "two step sizes",
        ("train.tokens_per_step", "train.accumulate"),
        lambda c: is_set(c.train, "tokens_per_step") and is_set(c.train, "accumulate"),
        "both say how large an optimizer step is",
        "keep one: tokens_per_step counts tokens over all ranks, accumulate counts micro-batches on each rank",
        {"train": {"tokens_per_step": 32768, "accumulate": 4}},
    ),
    Rule(
        "two warm-ups",
        ("optim.schedule.warmup_steps", "optim.schedule.warmup_ratio"),
        lambda c: is_set(c.optim.schedule, "warmup_steps") and is_set(c.optim.schedule, "warmup_ratio"),
        "both say how long the warm-up is",
        "keep one: a number of optimizer steps, or a share of all steps (rounded up)",
        {"optim": {"schedule": {"name": "cosine", "warmup_steps": 7, "warmup_ratio": 0.1}}},
    ),
    Rule(
        "warm-up and decay over 100 %",
        ("optim.schedule.decay_ratio", "optim.schedule.warmup_ratio"),
        _phases_too_long,
        "warm-up and decay together are longer than the run",
        "lower one of them, so that their sum is at most 1",
        {"optim": {"schedule": {"name": "wsd", "decay_ratio": 0.7, "warmup_ratio": 0.5}}},
    ),
    Rule(
        "two held-out sets",
        ("data.eval_fraction", "data.eval"),
        lambda c: c.data.eval_fraction > 0 and bool(c.data.eval),
        "both say which rows are held out",
        "keep [[data.eval]] for a file of its own, or eval_fraction for a share of the training rows",
        {"data": {"eval_fraction": 0.1, "eval": [{"path": "rows.jsonl"}]}},
    ),
    Rule(
        "rows from code without leave",
        ("data.train", "data.eval", "data.allow_code"),
        lambda c: not c.data.allow_code and any(item.rows for item in (*c.data.train, *c.data.eval)),
        "a data set's rows come from a function, and running code is off",
        "set data.allow_code = true if you trust that code",
        {"data": {"train": [{"path": "rows.jsonl", "rows": "loader.py:rows"}]}},
    ),
    Rule(
        "streaming in the order of the whole set",
        ("data.streaming", "data.shuffle"),
        lambda c: c.data.streaming and c.data.shuffle != "window",
        "trains while the data is read, and shuffling over the whole set needs the whole set",
        'set data.shuffle = "window"',
        {"data": {"streaming": True}, "train": {"max_steps": 10}},
    ),
    Rule(
        "streaming without an end",
        ("data.streaming", "train.max_steps"),
        lambda c: c.data.streaming and c.train.max_steps is None,
        "does not know how many steps an epoch has before it has ended",
        "set train.max_steps",
        {"data": {"streaming": True, "shuffle": "window"}},
    ),
    Rule(
        "a share of a stream held out",
        ("data.streaming", "data.eval_fraction"),
        lambda c: c.data.streaming and c.data.eval_fraction > 0,
        "would have to read all of the data for the rows that are held out",
        "name held-out rows under [[data.eval]]",
        {"data": {"streaming": True, "shuffle": "window", "eval_fraction": 0.1}, "train": {"max_steps": 10}},
    ),
    Rule(
        "duplicates of a stream",
        ("data.streaming", "data.dedup"),
        lambda c: c.data.streaming and c.data.dedup,
        "would have to remember every document that it ever gave",
        "leave out data.dedup, or data.streaming",
        {"data": {"streaming": True, "shuffle": "window", "dedup": True}, "train": {"max_steps": 10}},
    ),
    Rule(
        "rows from code in a stream",
        ("data.streaming", "data.train"),
        lambda c: c.data.streaming and any(item.rows for item in c.data.train),
        "reads files as they come, and a function's rows are written down first",
        "leave out data.streaming, or write the rows to files",
        {
            "data": {
                "streaming": True,
                "shuffle": "window",
                "allow_code": True,
                "train": [{"path": "rows.jsonl", "rows": "loader.py:rows"}],
            },
            "train": {"max_steps": 10},
        },
    ),
    Rule(
        "a data set of the hub as a stream",
        ("data.streaming", "data.train"),
        lambda c: c.data.streaming and any(item.path.startswith("hf://") for item in c.data.train),
        "reads files one after another, and the hub's client downloads all of a data set first",
        "give the files by their https:// addresses, or leave out data.streaming",
        {
            "data": {"streaming": True, "shuffle": "window", "train": [{"path": "hf://datasets/owner/name"}]},
            "train": {"max_steps": 10},
        },
    ),
    Rule(
        "streamed documents one by one",
        ("data.streaming", "data.packing", "train.accumulate"),
        lambda c: c.data.streaming and c.data.packing == "none" and c.train.accumulate is None,
        "does not know how long the documents are, so not how many of them make a step",
        "set train.accumulate, or another data.packing",
        {"data": {"streaming": True, "shuffle": "window", "packing": "none"}, "train": {"max_steps": 10}},
    ),
    Rule(
        "early stop without held-out data",
        ("train.early_stop", "data.eval", "data.eval_fraction"),
        lambda c: c.train.early_stop is not None and not has_held_out(c),
        "needs a held-out loss, and no data is held out",
        _NO_HELD_OUT_DO,
        {"train": {"early_stop": {"patience": 2}}},
    ),
    Rule(
        "early stop without evaluations",
        ("train.early_stop", "train.eval_every_steps"),
        lambda c: c.train.early_stop is not None and c.train.eval_every_steps is None,
        "looks at evaluations during the run, and there are none",
        "set train.eval_every_steps",
        {"train": {"early_stop": {"patience": 2}}, "data": {"eval_fraction": 0.1}},
    ),
    Rule(
        "evaluation without held-out data",
        ("train.eval_every_steps", "data.eval", "data.eval_fraction"),
        lambda c: is_set(c.train, "eval_every_steps") and not has_held_out(c),
        "asks for evaluations, and no data is held out",
        _NO_HELD_OUT_DO,
        {"train": {"eval_every_steps": 10}},
    ),
    Rule(
        "best without held-out data",
        ("checkpoint.final", "data.eval", "data.eval_fraction"),
        lambda c: c.checkpoint.final == "best" and not has_held_out(c),
        '"best" means the lowest held-out loss, and no data is held out',
        _NO_HELD_OUT_DO,
        {"checkpoint": {"final": "best"}},
    ),
    Rule(
        "best without a kept best",
        ("checkpoint.final", "checkpoint.keep_best"),
        lambda c: (
            c.checkpoint.keep_best == 0
            and (c.checkpoint.final == "best" or (c.checkpoint.final is None and c.train.early_stop is not None))
        ),
        "final/ is to hold the best weights, and checkpoint.keep_best = 0 keeps none",
        'set checkpoint.keep_best = 1, or checkpoint.final = "last"',
        {"checkpoint": {"final": "best", "keep_best": 0}, "data": {"eval_fraction": 0.1}},
    ),
    Rule(
        "shape of an adapter that is loaded",
        ("adapter.path", "adapter.r", "adapter.alpha", "adapter.targets", "adapter.init"),
        _adapter_shape_given,
        "goes on from an adapter whose rank, scale and targets are fixed by its own adapter_config.json",
        "leave out r, alpha, targets, rslora, dora, init, bias and modules_to_save, or leave out path",
        {"adapter": {"path": ".", "r": 8}},
    ),
    Rule(
        "initialisation from whole weights when sharded",
        ("adapter.init", "parallel.data"),
        _init_needs_whole_weights,
        "reads whole base weights, and no rank holds them when sharded",
        'set parallel.data = "replicate", or adapter.init = "default"',
        {"adapter": {"init": "pissa"}, "parallel": {"data": "shard"}},
    ),
    Rule(
        "a graph of updates in backward",
        ("train.cuda_graph", "optim.in_backward"),
        lambda c: c.train.cuda_graph and c.optim.in_backward,
        "a graph holds forward and backward alone",
        "leave one of them out",
        {"train": {"cuda_graph": True, "max_grad_norm": "none"}, "optim": {"in_backward": True}},
    ),
    Rule(
        "a graph of a step that saves memory",
        ("train.cuda_graph", "memory.recompute", "memory.offload"),
        lambda c: (
            c.train.cuda_graph
            and (c.memory.recompute not in ("auto", "none") or c.memory.offload not in ("auto", "none"))
        ),
        "computing again and offloading decide anew in each step what a graph fixes once",
        "leave them out where a graph pays, or set train.cuda_graph = false",
        {"train": {"cuda_graph": True}, "memory": {"recompute": "full"}},
    ),
    Rule(
        "a graph of a plan that may change",
        ("train.cuda_graph", "train.on_oom"),
        lambda c: c.train.cuda_graph and c.train.on_oom == "replan",
        "another memory plan would need another graph in the middle of a step",
        "leave one of them out",
        {"train": {"cuda_graph": True, "on_oom": "replan"}},
    ),
    Rule(
        "compiled layers in a graph",
        ("train.compile", "train.cuda_graph"),
        lambda c: c.train.compile and c.train.cuda_graph,
        "and train.cuda_graph both replace how layers are launched, and were proved each without the other",
        "leave one of them out",
        {"train": {"compile": True, "cuda_graph": True}},
    ),
    Rule(
        "compiled layers for rows of every length",
        ("train.compile", "data.packing"),
        lambda c: c.train.compile and c.data.packing == "none",
        "makes graphs for one length of row, and a document a row has as many lengths as there are documents",
        "set another data.packing, or leave out train.compile",
        {"train": {"compile": True}, "data": {"packing": "none"}},
    ),
    Rule(
        "compiled layers with an MLP in pieces",
        ("train.compile", "memory.tiled_mlp"),
        lambda c: c.train.compile and c.memory.tiled_mlp not in ("auto", 1),
        "takes a layer whole, and an MLP in pieces is run by a function that goes backward piece by piece",
        "leave out memory.tiled_mlp or train.compile",
        {"train": {"compile": True}, "memory": {"tiled_mlp": 4}},
    ),
    Rule(
        "compiled layers whose weights come and go",
        ("train.compile", "memory.offload_weights"),
        lambda c: c.train.compile and c.memory.offload_weights != "none",
        "was not proved with weights whose memory is given back between layers",
        "leave out memory.offload_weights or train.compile",
        {"train": {"compile": True}, "memory": {"offload_weights": "cpu"}},
    ),
    Rule(
        "compiled layers over weights in fewer bits",
        ("train.compile", "model.base_weights"),
        lambda c: c.train.compile and c.model.base_weights != "bf16",
        "takes no tensor that linears share, as the buffer is into which weights in fewer bits are dequantised, and what FP8 ones are joined in",
        'set model.base_weights = "bf16", or leave out train.compile',
        {"train": {"compile": True}, "model": {"base_weights": "nf4"}},
    ),
    Rule(
        "compiled layers of a plan that may change",
        ("train.compile", "train.on_oom"),
        lambda c: c.train.compile and c.train.on_oom == "replan",
        "would be compiled anew in the middle of a step where the memory plan changes",
        "leave one of them out",
        {"train": {"compile": True, "on_oom": "replan"}},
    ),
    Rule(
        "compiled layers around compiled attention",
        ("train.compile", "model.attention"),
        lambda c: c.train.compile and c.model.attention == "flex",
        "runs attention as an op, and FlexAttention is compiled itself, which torch does not do inside an op",
        "set another model.attention, or leave out train.compile",
        {"train": {"compile": True}, "model": {"attention": "flex"}},
    ),
    Rule(
        "low-precision weights, full-precision maths",
        ("train.master", "train.precision"),
        lambda c: c.train.master == "bfloat16" and c.train.precision == "fp32",
        "keeps trained weights in bf16 while the computation is fp32: the updates would be rounded away",
        'set train.master = "float32", or train.precision = "bf16"',
        {"train": {"master": "bfloat16", "precision": "fp32"}},
    ),
    Rule(
        "weights in fewer bits that are trained",
        ("model.base_weights", "adapter.name"),
        lambda c: c.model.base_weights != "bf16" and c.adapter.name == "none",
        "holds frozen weights in fewer bits, and full fine-tuning freezes none",
        'set model.base_weights = "bf16", or train a LoRA (adapter.name = "lora")',
        {"model": {"base_weights": "fp8"}, "adapter": {"name": "none"}},
    ),
    Rule(
        "layers that are left out of FP8, without FP8",
        ("model.keep_ends", "model.base_weights"),
        lambda c: c.model.keep_ends is not None and c.model.base_weights != "fp8",
        "says which layers stay in bf16 where the others are held in FP8, and here none is",
        'leave out model.keep_ends, or set model.base_weights = "fp8"',
        {"model": {"keep_ends": 2}},
    ),
    Rule(
        "weights in fewer bits that are sharded",
        ("model.base_weights", "parallel.data"),
        lambda c: c.model.base_weights != "bf16" and c.parallel.data == "shard",
        "is quantised from whole weights, and no rank holds them when sharded",
        'set parallel.data = "replicate", or model.base_weights = "bf16"',
        {"model": {"base_weights": "fp8"}, "parallel": {"data": "shard"}},
    ),
    Rule(
        "weights in fewer bits and what reads whole ones",
        ("model.base_weights", "adapter.dora", "adapter.init"),
        lambda c: (
            c.model.base_weights != "bf16"
            and isinstance(c.adapter, LoraConfig)
            and (c.adapter.dora or c.adapter.init in ("pissa", "olora"))
        ),
        "holds no weight that DoRA, PiSSA or OLoRA could read or change",
        'set model.base_weights = "bf16", or leave out adapter.dora and adapter.init',
        {"model": {"base_weights": "fp8"}, "adapter": {"dora": True}},
    ),
    Rule(
        "update in backward, and clipping",
        ("optim.in_backward", "train.max_grad_norm"),
        lambda c: c.optim.in_backward and c.train.max_grad_norm != "none",
        "updates weights before the norm of the whole gradient is known, so nothing can be scaled to it",
        'set train.max_grad_norm = "none", or leave out optim.in_backward',
        {"optim": {"in_backward": True}},
    ),
    Rule(
        "update in backward, and several micro-batches",
        ("optim.in_backward", "train.accumulate"),
        lambda c: c.optim.in_backward and (c.train.accumulate or 1) > 1,
        "applies a gradient as soon as one backward brings it, and a step of several micro-batches has several",
        "set train.accumulate = 1, or leave out optim.in_backward",
        {"optim": {"in_backward": True}, "train": {"accumulate": 2, "max_grad_norm": "none"}},
    ),
    Rule(
        "update in backward, and steps made again",
        ("optim.in_backward", "train.on_oom"),
        lambda c: c.optim.in_backward and c.train.on_oom == "replan",
        "has changed some weights when a backward runs out of memory, so the step cannot be made again",
        "leave out one of them",
        {"optim": {"in_backward": True}, "train": {"on_oom": "replan", "max_grad_norm": "none"}},
    ),
    Rule(
        "LoRA+ without LoRA",
        ("optim.lora_plus_ratio", "adapter.name"),
        lambda c: c.optim.lora_plus_ratio is not None and c.adapter.name == "none",
        "is the rate of B matrices over that of A matrices, and full fine-tuning has none",
        "leave out optim.lora_plus_ratio",
        {"optim": {"lora_plus_ratio": 16}, "adapter": {"name": "none"}},
    ),
    Rule(
        "whole-weight optimizers that are sharded",
        ("optim.name", "parallel.data"),
        lambda c: c.optim.name in ("adamw_8bit", "adafactor") and c.parallel.data == "shard",
        "works on whole weights (8-bit blocks, means over columns), and no rank holds them when sharded",
        'set parallel.data = "replicate", or optim.name = "adamw" with optim.states = "bfloat16"',
        {"optim": {"name": "adafactor"}, "parallel": {"data": "shard"}},
    ),
    Rule(
        "paged moments of torchao",
        ("optim.paged", "optim.library"),
        lambda c: isinstance(c.optim, AdamW8bitConfig) and c.optim.paged and c.optim.library == "torchao",
        "is bitsandbytes' own memory, which torchao does not use",
        "leave out optim.paged, or optim.library",
        {"optim": {"name": "adamw_8bit", "paged": True, "library": "torchao"}},
    ),
    Rule(
        "two homes of the moments",
        ("memory.offload_states", "optim.paged"),
        lambda c: c.memory.offload_states != "none" and isinstance(c.optim, AdamW8bitConfig) and c.optim.paged,
        "and optim.paged both say where the moments lie",
        "keep one of them",
        {"memory": {"offload_states": "cpu"}, "optim": {"name": "adamw_8bit", "paged": True}},
    ),
    Rule(
        "states of shards on the host",
        ("memory.offload_states", "parallel.data"),
        lambda c: c.memory.offload_states != "none" and c.parallel.data == "shard",
        "moves whole tensors, and a rank holds parts of them when sharded",
        'leave out memory.offload_states, or set parallel.data = "replicate"',
        {"memory": {"offload_states": "cpu"}, "parallel": {"data": "shard"}},
    ),
    Rule(
        "host memory for nothing",
        ("memory.offload_host", "memory.offload_keep", "memory.offload"),
        lambda c: (is_set(c.memory, "offload_host") or c.memory.offload_keep > 0) and c.memory.offload == "none",
        "says how much lies where, and nothing is offloaded",
        'set memory.offload = "cpu", or leave out memory.offload_host and memory.offload_keep',
        {"memory": {"offload_host": 64}},
    ),
    Rule(
        "weights that are gone when they are wanted",
        ("memory.offload_weights", "memory.recompute"),
        lambda c: (
            c.memory.offload_weights != "none"
            and (c.memory.recompute not in ("auto", "full", "selective") or isinstance(c.memory.recompute_layers, int))
        ),
        "a layer that is not computed again would go back through weights that have left the GPU",
        'set memory.recompute = "full" or "selective" of all layers, or leave out memory.offload_weights',
        {"memory": {"offload_weights": "cpu", "recompute": "none"}},
    ),
    Rule(
        "weights that leave before they are updated",
        ("memory.offload_weights", "optim.in_backward"),
        lambda c: c.memory.offload_weights != "none" and c.adapter.name == "none" and not c.optim.in_backward,
        "trained weights are on the GPU in the backward pass of their layer alone, and are updated there",
        "set optim.in_backward = true, or leave out memory.offload_weights",
        {"adapter": {"name": "none"}, "memory": {"offload_weights": "cpu"}},
    ),
    Rule(
        "weights on the host and in fewer bits",
        ("memory.offload_weights", "model.base_weights"),
        lambda c: c.memory.offload_weights != "none" and c.model.base_weights != "bf16",
        "codes are not fetched layer by layer",
        "leave out memory.offload_weights or model.base_weights",
        {"memory": {"offload_weights": "cpu"}, "model": {"base_weights": "nf4"}},
    ),
    Rule(
        "adapters made of weights on the host",
        ("memory.offload_weights", "adapter.init", "adapter.dora"),
        lambda c: (
            c.memory.offload_weights != "none"
            and isinstance(c.adapter, LoraConfig)
            and (c.adapter.dora or c.adapter.init in ("pissa", "olora"))
        ),
        "they are made of the base's weights, on the GPU",
        "leave out memory.offload_weights, or adapter.dora and adapter.init",
        {"adapter": {"dora": True}, "memory": {"offload_weights": "cpu"}},
    ),
    Rule(
        "weights on the host of several ranks",
        ("memory.offload_weights", "parallel.data"),
        lambda c: c.memory.offload_weights != "none" and c.parallel.data == "shard",
        "sharded weights are gathered from the other ranks",
        "leave out memory.offload_weights or parallel.data",
        {"memory": {"offload_weights": "cpu"}, "parallel": {"data": "shard"}},
    ),
    Rule(
        "layers of no recompute",
        ("memory.recompute_layers", "memory.recompute"),
        lambda c: isinstance(c.memory.recompute_layers, int) and c.memory.recompute == "none",
        "says how many layers are computed again, and none is",
        'set memory.recompute = "full" or "selective", or leave out memory.recompute_layers',
        {"memory": {"recompute": "none", "recompute_layers": 4}},
    ),
    Rule(
        "layers of no offload",
        ("memory.offload_layers", "memory.offload"),
        lambda c: isinstance(c.memory.offload_layers, int) and c.memory.offload == "none",
        "says of how many layers it is, and nothing is offloaded",
        'set memory.offload = "cpu", or leave out memory.offload_layers',
        {"memory": {"offload_layers": 4}},
    ),
    Rule(
        "a folder for nothing",
        ("memory.offload_dir", "memory.offload", "memory.offload_states"),
        lambda c: is_set(c.memory, "offload_dir") and not uses_disk(c) and c.memory.offload != "auto",
        "names a folder, and nothing goes to disk",
        'set memory.offload or memory.offload_states to "disk", or leave out memory.offload_dir',
        {"memory": {"offload_dir": "/tmp"}},
    ),
    Rule(
        "revision of a local model",
        ("model.revision", "model.path"),
        lambda c: c.model.revision is not None and Path(c.model.path).exists(),
        "chooses a version on the hub, and model.path is on this disk",
        "leave out model.revision, or give a hub id as model.path",
        {"model": {"path": ".", "revision": "main"}},
    ),
)


@dataclass(frozen=True)
class RefusedValue:
    """Values that people ask for and that rft does not do, with the reason."""

    keys: tuple[str, ...]
    values: tuple[Any, ...]
    reason: str
    do: str


REFUSED_VALUES: tuple[RefusedValue, ...] = (
    RefusedValue(
        ("train.precision", "train.master"),
        ("fp16", "float16", "half", "f16", "16", "16-mixed", 16),
        "fp16 is not offered: its range ends at 65,504 and below 6e-8, so it needs a loss scaler, "
        "which cannot unscale weights that are themselves fp16; rft trains in bf16 or fp32",
        'set train.precision = "bf16" (the range of fp32, no scaler), or "fp32" where the GPU has no bf16',
    ),
    RefusedValue(
        ("train.precision",),
        ("bfloat16", "bf16-mixed", "mixed", "bf16-true"),
        "the word here is bf16",
        'set train.precision = "bf16"; trained weights stay in fp32 unless train.master = "bfloat16"',
    ),
    RefusedValue(
        ("train.precision",),
        ("float32", "32", "32-true", 32, "full"),
        "the word here is fp32",
        'set train.precision = "fp32"',
    ),
    RefusedValue(
        ("train.master",), ("bf16", "fp32"), "masters are named in full", 'set train.master = "bfloat16" or "float32"'
    ),
    RefusedValue(
        ("adapter.name",),
        ("qlora",),
        "QLoRA is a LoRA over a base in 4 bits",
        'set adapter.name = "lora" and model.base_weights = "nf4"',
    ),
    RefusedValue(
        ("adapter.name",),
        ("full", "full_finetuning", "null"),
        "full fine-tuning is written as no adapter",
        'set adapter.name = "none"',
    ),
)

FOREIGN_KEYS: dict[str, str] = {
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "scheduler": "optim.schedule",
    "warmup": "optim.schedule.warmup_steps",
    "base_model": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset": "data.train",
    "datasets": "data.train",
    "train_file": "data.train.0.path",
    "max_len": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "cutoff_len": "data.seq_len",
    "sample_packing": "data.packing",
    "chat_template": "data.template",
    "val_set_size": "data.eval_fraction",
    "batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "gradient_accumulation": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "gradient_clipping": "train.max_grad_norm",
    "max_norm": "train.max_grad_norm",
    "output_dir": "train.out",
    "eval_steps": "train.eval_every_steps",
    "save_steps": "checkpoint.save_every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "logging_steps": "log.every_steps",
    "report_to": "log.trackers",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "rank": "adapter.r",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.targets",
    "target_modules": "adapter.targets",
    "use_dora": "adapter.dora",
    "use_rslora": "adapter.rslora",
    "attn_implementation": "model.attention",
}
"""What other programs call our keys."""

FOREIGN_TABLES: dict[str, str] = {
    "lora": "adapter",
    "peft": "adapter",
    "qlora": "adapter",
    "optimizer": "optim",
    "trainer": "train",
    "training_args": "train",
    "logging": "log",
    "wandb": "log",
    "tracking": "log",
    "dataset": "data",
    "datasets": "data",
    "checkpointing": "checkpoint",
    "distributed": "parallel",
}
"""What other programs call our tables."""
