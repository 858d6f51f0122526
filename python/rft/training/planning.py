"""What a config would take on a machine that need not be there: from the model's config alone, without weights and without a GPU."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rft.adapters.lora import inject, train_everything
from rft.config.adapter import LoraConfig
from rft.config.compatibility import RULES
from rft.config.root import Config
from rft.data.folder import default_root
from rft.errors import ModelError, Refused, RftError
from rft.memory.planner import GIB, Planned
from rft.models.attention import register
from rft.models.describe import Facts, describe
from rft.models.head import auto_chunk_rows
from rft.models.probe import Probed, probe_config
from rft.models.source import read_config
from rft.training import without_effect
from rft.training.decision import Decision
from rft.training.machine import Machine
from rft.training.resolve import planned_for, resolve, resolve_precision

BYTES_PER_TOKEN = 4.2
"""Of a text file, where the data was not prepared: English and code in current vocabularies."""
MOST_CHANGES = 3


@dataclass(frozen=True)
class Answer:
    """What `rft plan` says."""

    config: Config
    """Resolved for that machine."""
    facts: Facts
    machine: Machine
    decisions: list[Decision]
    planned: Planned
    tokens: int | None
    """Of an epoch, estimated from the size of the files; None: they are not on this machine."""
    steps: int | None
    changes: tuple[str, ...] = ()
    """Where nothing fits: the cheapest changes that would, the fastest first."""
    without_effect: tuple[str, ...] = ()
    """Keys that were given for nothing, each in a line."""

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.planned.tokens_per_second * self.machine.world_size

    @property
    def tokens_per_step(self) -> int:
        problem = self.planned.problem
        return problem.packs * problem.seq_len * self.machine.world_size

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes, seconds, tokens."""
        chosen, problem = self.planned.chosen, self.planned.problem
        return {
            "fits": self.planned.fits,
            "model": {"class": self.facts.name, "parameters": self.facts.num_parameters, "trained": self.facts.num_trained},
            "machine": {
                "gpu": self.machine.device_name, "memory_bytes": self.machine.memory_bytes, "ranks": self.machine.world_size,
                "per_node": self.machine.per_node or self.machine.world_size, "rates": self.planned.machinery.rates.source,
            },
            "memory": {
                "allocated": chosen.sizes.allocated, "beside": chosen.sizes.beside, "peak_bytes": chosen.sizes.peak,
                "total_bytes": chosen.total, "limit_bytes": problem.memory_bytes, "host_bytes": chosen.sizes.host,
                "disk_bytes": chosen.sizes.disk, "moment": chosen.sizes.moment, "layer": chosen.sizes.layer,
            },
            "step": {
                "tokens": self.tokens_per_step, "seconds": chosen.seconds, "parts": chosen.times.parts, "launch": chosen.times.launch,
                "bound_by": chosen.times.bound_by, "flops": self.step_flops(), "tokens_per_second": self.tokens_per_second,
            } if self.machine.kind == "cuda" else {"tokens": self.tokens_per_step, "flops": self.step_flops()},
            "run": {"tokens": self.tokens, "steps": self.steps, "seconds": None if self.steps is None or self.machine.kind == "cpu" else self.steps * chosen.seconds},
            "plan": vars(chosen.plan),
            "reasons": {d.key: {"value": _plain(d.value), "reason": d.reason} for d in self.decisions},
            "alternatives": self.planned.nearest(),
            "changes": list(self.changes),
            "without_effect": list(self.without_effect),
        }  # fmt: skip

    def step_flops(self) -> float:
        """Really needed, of all ranks: no recompute."""
        problem = self.planned.problem
        return self.facts.flops([problem.seq_len] * problem.packs) * self.machine.world_size


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | None) else str(value)


def answer(config: Config, machine: Machine) -> Answer:
    """Plan a checked config for a machine. Raises RftError kinds for what the model or the config cannot have there."""
    model_config = _model_config(config)
    ask = _Asking(model_config, probe_config(model_config, trust_remote_code=config.model.trust_remote_code))
    made = ask.answer(config, machine)
    if not made.planned.fits:
        made = replace(made, changes=tuple(_changes_that_fit(config, made, ask)))
    return made


class _Asking:
    """One model, about which several configs and machines are asked. It is built once for each way to train it."""

    def __init__(self, model_config: Any, probed: Probed):
        self._model_config, self._probed = model_config, probed
        self._facts: dict[str, Facts] = {}

    def answer(self, config: Config, machine: Machine) -> Answer:
        config, decisions = resolve_precision(config, machine)
        key = repr((config.adapter, config.train.precision, config.train.master))
        if key not in self._facts:
            self._facts[key] = _facts(config, self._model_config)
        facts, probed = self._facts[key], self._probed
        if config.model.base_weights == "fp8":
            _refuse_fp8(machine)
        kernels = machine.kind == "cuda"
        size = 4 if config.train.precision == "fp32" else 2
        rows = auto_chunk_rows(
            machine.kind, facts.vocab_size, kernels=kernels, head_trained=config.adapter.name == "none", itemsize=size
        )
        given = config
        config, more = resolve(
            config, facts, machine, attention=_attention(machine, probed), chunk_rows=rows, store=str(default_root()), kernels=kernels,
            isolates=probed.isolates,
        )  # fmt: skip
        planned = planned_for(config, facts, machine, kernels=kernels, can_recompute=True, isolates=probed.isolates)
        tokens = _tokens_of_files(config)
        made = Answer(config, facts, machine, [*decisions, *more], planned, tokens, None)
        steps = config.train.max_steps
        if steps is None and tokens is not None:
            steps = max(
                1, math.ceil(config.train.epochs * tokens / made.tokens_per_step)
            )  # an epoch's last step may be short
        idle = without_effect.lines(without_effect.Resolved(given, config, machine, facts.num_layers, steps))
        return replace(made, steps=steps, without_effect=tuple(idle))


def _model_config(config: Config) -> Any:
    """The `transformers` config alone: a folder needs no weights, of a hub id only its small files are read."""
    path = Path(config.model.path).expanduser()
    if path.is_file():
        from rft.models.source import find_model

        return find_model(config.model).config
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        try:
            path = Path(snapshot_download(config.model.path, revision=config.model.revision, allow_patterns=["*.json"]))
        except Exception as error:  # the hub's client raises many kinds: each ends the plan here
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise ModelError(
                f"model.path = {config.model.path!r}",
                f"is no directory here, and its config could not be fetched: {reason}",
                do="give a directory that holds config.json, or check the id and the network",
            ) from None
    found = read_config(path, config.model)
    if getattr(found, "quantization_config", None):
        del found.quantization_config
    return found


def _facts(config: Config, model_config: Any) -> Facts:
    from transformers import AutoModelForCausalLM

    register()
    half = config.train.precision == "bf16"
    dtype = torch.bfloat16 if half else torch.float32
    master = torch.bfloat16 if half and config.train.master == "bfloat16" else torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, trust_remote_code=config.model.trust_remote_code
            )
    except Exception as error:  # whatever the model's own code stumbles over, its config says it
        raise ModelError(
            config.model.path, f"transformers cannot build this model: {type(error).__name__}: {error}"
        ) from None
    if isinstance(config.adapter, LoraConfig):
        model = inject(model, config.adapter, dtype=master)
    else:
        train_everything(model, dtype=master)
    return describe(model)


def _refuse_fp8(machine: Machine) -> None:
    """As a run there would be."""
    from rft.memory.devices import find_gpu

    gpu = find_gpu(machine.device_name)
    if machine.kind == "cpu" or (gpu is not None and gpu.capability < (8, 9)):
        what = "a CPU" if gpu is None else f"{gpu.name} has {'.'.join(map(str, gpu.capability))}"
        raise Refused(
            'model.base_weights = "fp8"',
            f"FP8 products need compute capability 8.9 (Ada, Hopper or newer): {what}",
            do='set model.base_weights = "bf16" or "nf4"',
        )


def _attention(machine: Machine, probed: Probed) -> tuple[str, str]:
    """What would serve there, as far as that can be told from here."""
    from rft.memory.devices import find_gpu

    if machine.kind == "cpu":
        return "sdpa", "a CPU"
    if probed.needs.softcap or probed.needs.sinks:
        return "flex", "the model has a soft-cap or sinks"
    gpu = find_gpu(machine.device_name)
    try:
        fa4 = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        fa4 = False
    if gpu is not None and gpu.capability[0] >= 9 and fa4:
        return "fa4", "flash_attn.cute is installed here"
    return "varlen", "torch's own; with flash-attn-4 on Hopper attention is about twice as fast"


def _tokens_of_files(config: Config) -> int | None:
    """About, from the sizes of local files."""
    total = 0.0
    for item in config.data.train:
        if not item.path:
            return None
        path = Path(item.path).expanduser()
        files = (
            [path] if path.is_file() else [f for f in sorted(path.rglob("*")) if f.is_file()] if path.is_dir() else []
        )
        if not files and "*" in path.name and path.parent.is_dir():
            files = [f for f in path.parent.glob(path.name) if f.is_file()]
        if not files:
            return None
        total += sum(f.stat().st_size for f in files) * item.weight
    return int(total / BYTES_PER_TOKEN) or None


# ---- where nothing fits


@dataclass(frozen=True)
class _Change:
    """One thing to do: keys of one table, or more GPUs."""

    words: str
    table: str
    keys: dict[str, Any]
    ranks: int | None = None


def _changes_that_fit(config: Config, made: Answer, ask: _Asking) -> Iterator[str]:
    """Changes of the config or the machine under which it fits, the fastest first; two at once where no single one will do."""
    single = list(_changes(config, made))
    pairs = [
        (a, b)
        for i, a in enumerate(single)
        for b in single[i + 1 :]
        if a.table != b.table or a.keys.keys() != b.keys.keys()
    ]
    for tried in ([(one,) for one in single], pairs):
        found: list[tuple[float, str]] = []
        for changes in tried:
            tree = config.model_dump(exclude_unset=True)
            machine = made.machine
            for change in changes:
                tree = _merged(tree, change.table, change.keys)
                if change.ranks is not None:
                    per_node = min(change.ranks, machine.per_node or change.ranks)
                    machine = replace(machine, world_size=change.ranks, per_node=per_node)
            try:
                changed = Config.model_validate(tree)
                if any(rule.when(changed) for rule in RULES):  # as the config would be refused
                    continue
                other = ask.answer(changed, machine)
            except (RftError, ValueError):  # refused for a reason of its own
                continue
            if other.planned.fits:
                speed = other.planned.tokens_per_second
                gib = other.planned.chosen.total / GIB
                words = " and ".join(change.words for change in changes)
                found.append((-speed, f"{words}: {gib:.1f} GiB, about {speed:,.0f} tok/s a GPU"))
        if found:
            yield from (words for _, words in sorted(found)[:MOST_CHANGES])
            return


def _changes(config: Config, made: Answer) -> Iterator[_Change]:
    def one(table: str, **keys: Any) -> _Change:
        return _Change("set " + ", ".join(f"{table}.{k} = {_toml(v)}" for k, v in keys.items()), table, keys)

    if config.memory.recompute != "auto":
        yield one("memory", recompute="auto")
    if config.train.micro_batch != "auto":
        yield one("train", micro_batch="auto")
    if config.memory.offload == "none":
        yield one("memory", offload="cpu")
    if config.loss.chunk_rows != "least":
        yield one("loss", chunk_rows="least")
    if config.adapter.name == "lora" and config.model.base_weights != "nf4":
        yield one("model", base_weights="nf4")
    one_update = config.adapter.name == "lora" or config.optim.in_backward
    if config.model.base_weights == "bf16" and config.memory.offload_weights == "none" and one_update:
        yield one("memory", offload_weights="cpu")
    if config.adapter.name == "none":
        yield one("optim", name="adamw_8bit")
        yield one("memory", offload_states="cpu")
        yield one("adapter", name="lora")
    length = made.config.data.seq_len or 0
    for part in (2, 4):
        if length // part >= 512:
            yield one("data", seq_len=length // part)
    if made.config.model.base_weights == "bf16":
        for ranks in (2, 4, 8):
            if ranks > made.machine.world_size:
                yield _Change(f'take {ranks} GPUs with parallel.data = "shard"', "parallel", {"data": "shard"}, ranks)


def _merged(tree: dict[str, Any], table: str, keys: dict[str, Any]) -> dict[str, Any]:
    old = {} if keys.get("name") else dict(tree.get(table) or {})  # another optimizer or adapter has other keys
    return {**tree, table: {**old, **keys}}


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
