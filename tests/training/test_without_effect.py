"""Keys that were given and have no effect in the resolved run are told, each in one line; those that act are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rft import log
from rft.config.loss import LossConfig
from rft.config.memory import MemoryConfig
from rft.config.root import Config
from rft.config.train import TrainConfig
from rft.models.facts import Facts
from rft.training.machine import Machine
from rft.training.resolve import resolve, resolve_precision
from rft.training.without_effect import IDLE, Resolved, lines, tell, without_effect

CPU = Machine("cpu", "AVX-512 BF16", 24 << 30, 1, True, 2)
H200 = Machine("cuda", "NVIDIA H200", 139 << 30, 1, True, 16)
FACTS = Facts(
    name="LlamaForCausalLM", model_type="llama", num_layers=2, hidden_size=64, vocab_size=400, max_positions=4096, num_parameters=100_000,
    num_trained=1_000, weight_bytes=200_000, trained_bytes=4_000, matmul_frozen=90_000, matmul_trained=1_000, num_heads=4, head_size=16,
    is_moe=False, num_experts=0, experts_per_token=0, is_tied=False,
)  # fmt: skip

FEW = {
    "train": {"micro_batch": 2},
    "memory": {"recompute": "full", "recompute_layers": 1, "offload": "none", "offload_layers": "all", "tiled_mlp": 1},
}
HELD_OUT: dict[str, Any] = {"data": {"eval_fraction": 0.1}}
IDLE_EXAMPLES: dict[str, list[tuple[dict[str, Any], Machine, str]]] = {
    "memory.recompute_layers": [
        ({"memory": {"recompute_layers": 1}}, H200, "recompute is none"),
        ({"memory": {"recompute_layers": 1}}, CPU, "recompute is none"),
        ({"memory": {"recompute": 2, "recompute_layers": 2}}, H200, "= 2 names 1 layer"),
    ],
    "memory.offload_layers": [({"memory": {"offload": "auto", "offload_layers": 1}}, H200, "offload is none")],
    "memory.offload_host": [({"memory": {"offload": "auto", "offload_host": 4.0}}, H200, "offload is none")],
    "memory.offload_keep": [({"memory": {"offload": "auto", "offload_keep": 0.5}}, CPU, "offload is none")],
    "memory.offload_dir": [({"memory": {"offload": "auto", "offload_dir": "/d"}}, H200, "nothing goes to disk")],
    "memory.limit": [
        ({"memory": {"limit": 8.0}}, CPU, "not planned"),
        ({"memory": {"limit": 138.9}}, H200, "cannot take more"),
        ({**FEW, "memory": {**FEW["memory"], "limit": 8.0}}, H200, "decides nothing"),
    ],
    "memory.tiled_mlp": [({"memory": {"tiled_mlp": 100}, "data": {"seq_len": 320}, "train": {"micro_batch": 1}}, H200, "are 20 pieces")],
    "train.epochs": [({"train": {"epochs": 3.0, "max_steps": 5}}, H200, "max_steps = 5 says")],
    "train.deterministic": [({"train": {"deterministic": False}}, CPU, "always deterministic")],
    "train.eval_every_steps": [({"train": {"eval_every_steps": 50}, **HELD_OUT}, H200, "has 20 steps")],
    "train.early_stop": [
        ({"train": {"eval_every_steps": 10, "early_stop": {"patience": 3}}, **HELD_OUT}, H200, "2 evaluations in 20 steps are fewer")
    ],
}  # fmt: skip
"""Key -> tables in which it has no effect, the machine, and what is told of it. The run has 20 steps."""

ACTING: tuple[tuple[dict[str, Any], Machine], ...] = (
    ({}, H200),
    ({"memory": {"recompute": "full", "recompute_layers": 1}}, H200),
    ({"memory": {"recompute_layers": "all", "offload_layers": "all", "offload_keep": 0.0}}, CPU),
    ({"memory": {"offload": "cpu", "offload_layers": 1, "offload_host": 4.0, "offload_keep": 0.5}}, CPU),
    ({"memory": {"offload_states": "disk", "offload_dir": "/d"}}, H200),
    ({"memory": {"limit": 8.0}}, H200),
    ({"memory": {"tiled_mlp": 4}, "data": {"seq_len": 320}, "train": {"micro_batch": 1}}, H200),
    ({"train": {"epochs": 3.0}}, H200),
    ({"train": {"epochs": 1.0, "max_steps": 5, "deterministic": True}}, CPU),
    ({"train": {"eval_every_steps": 20}, **HELD_OUT}, H200),
    ({"train": {"eval_every_steps": 5, "early_stop": {"patience": 3}}, **HELD_OUT}, H200),
)

ALWAYS = {
    "memory.recompute": "layers are computed again as it says, or refused",
    "memory.offload": "tensors leave as it says, on a CPU as copies",
    "memory.offload_states": "states lie where it says; refused where sharded",
    "memory.offload_weights": "weights lie where it says; refused where they cannot",
    "loss.chunk_rows": "every head makes its logits in chunks of it",
    "train.max_steps": "the run ends there",
    "train.tokens_per_step": "with accumulate it is refused; a larger step is told (tell_larger_step)",
    "train.accumulate": "the size of a step",
    "train.micro_batch": "packs at one time; a larger step is told",
    "train.master": "refused where the run computes in fp32",
    "train.precision": "refused where it cannot be had",
    "train.seed": "everything random",
    "train.max_grad_norm": "refused with updates in backward",
    "train.cuda_graph": "refused, or declined with a receipt and a warning",
    "train.compile": "refused, or declined with a receipt and a warning",
    "train.on_oom": "a step that runs out of memory; refused with several processes",
    "train.out": "the run directory",
}
"""Keys that act wherever they are not refused, and how."""


def config(tables: dict[str, Any]) -> Config:
    data = {"train": [{"path": "d"}], **tables.get("data", {})}
    return Config.model_validate({"model": {"path": "m"}, **tables, "data": data})


def resolved(tables: dict[str, Any], machine: Machine) -> Resolved:
    given, _ = resolve_precision(config(tables), machine)
    made, _ = resolve(given, FACTS, machine, attention=("varlen", "serves it"), chunk_rows=512, store="/sets")
    return Resolved(given, made, machine, FACTS.num_layers, steps=20)


def test_every_key_of_these_tables_acts_always_or_is_looked_at():
    tables = {"memory": MemoryConfig, "loss": LossConfig, "train": TrainConfig}
    keys = {f"{table}.{name}" for table, model in tables.items() for name in model.model_fields}
    assert keys == IDLE.keys() | ALWAYS.keys()
    assert not IDLE.keys() & ALWAYS.keys()
    assert IDLE.keys() == IDLE_EXAMPLES.keys()


@pytest.mark.parametrize(
    ("key", "tables", "machine", "reason"), [(key, *example) for key, examples in IDLE_EXAMPLES.items() for example in examples]
)  # fmt: skip
def test_a_key_without_effect_is_told_with_the_reason(key: str, tables: dict[str, Any], machine: Machine, reason: str):
    found = without_effect(resolved(tables, machine))
    assert found.keys() == {key}
    assert reason in found[key]


@pytest.mark.parametrize(("tables", "machine"), ACTING)
def test_what_acts_or_says_what_happens_anyway_is_not_told(tables: dict[str, Any], machine: Machine):
    assert without_effect(resolved(tables, machine)) == {}


def test_a_line_names_the_key_its_value_and_why():
    given: dict[str, Any] = {"memory": {"recompute_layers": 1}, "train": {"deterministic": False}}
    assert lines(resolved(given, CPU)) == [
        "memory.recompute_layers = 1 has no effect: memory.recompute is none",
        "train.deterministic = false has no effect: a CPU is always deterministic",
    ]


def test_what_was_told_already_is_not_told_again(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(log, "warn", told.append)
    tables: dict[str, Any] = {"memory": {"recompute_layers": 1}, "train": {"eval_every_steps": 50}, **HELD_OUT}
    known = resolved(tables, H200)
    before = dataclasses.replace(known, steps=None)
    tell(before)
    assert [line.split()[0] for line in told] == ["memory.recompute_layers"]
    tell(known, but=before)
    assert [line.split()[0] for line in told] == ["memory.recompute_layers", "train.eval_every_steps"]


def test_the_examples_pass_the_rules_over_several_keys():
    """They are no configs that are refused before anything is decided."""
    from rft.config.compatibility import RULES

    for examples in IDLE_EXAMPLES.values():
        for tables, _, _ in examples:
            made = config(tables)
            assert [rule.name for rule in RULES if rule.when(made)] == []
