"""Which rate, decay and rule each trained parameter has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from rft.config.optim import GroupConfig, OptimConfig
from rft.errors import ConfigError
from rft.optim.rule import Rule

RuleOf = Callable[[str, Tensor], Rule]


def decays(name: str, parameter: Tensor, embeddings: frozenset[str]) -> bool:
    """Whether weight decay belongs on it: matrices, but neither norms and biases (1-D) nor embedding tables."""
    return parameter.ndim >= 2 and name not in embeddings


def is_lora_B(name: str) -> bool:
    """Whether LoRA+ gives it the higher rate."""
    return ".lora_B." in f".{name}" or ".lora_embedding_B." in f".{name}"


def parameter_groups(
    named: Iterable[tuple[str, Tensor]],
    config: OptimConfig,
    lr: float,
    embeddings: frozenset[str] = frozenset(),
    *,
    rule_of: RuleOf | None = None,
) -> list[dict[str, Any]]:
    """Groups of equal rate, decay and rule, each {"names", "params", "lr", "weight_decay", "rule"}.

    A `[[optim.groups]]` entry takes every parameter whose name it matches (the first match counts); its own weight_decay holds
    for all of these, and LoRA+ multiplies only the rates that no entry sets. Raises ConfigError for an entry that matches nothing:
    it would silently do nothing.
    """
    groups: dict[tuple[int, float, float, int], dict[str, Any]] = {}
    matched: set[int] = set()
    for name, parameter in named:
        index, special = _first_match(name, config.groups)
        matched.add(index)
        rate = lr * config.lora_plus_ratio if config.lora_plus_ratio and is_lora_B(name) else lr
        if special and special.lr is not None:
            rate = special.lr
        decay = config.weight_decay if decays(name, parameter, embeddings) else 0.0
        if special and special.weight_decay is not None:
            decay = special.weight_decay
        rule = rule_of(name, parameter) if rule_of else None
        made = {"names": [], "params": [], "lr": rate, "weight_decay": decay, "rule": rule}
        group = groups.setdefault((index, rate, decay, id(rule)), made)
        group["names"].append(name)
        group["params"].append(parameter)
    for index, entry in enumerate(config.groups):
        if index not in matched:
            raise ConfigError(
                f"optim.groups.{index}.match",
                f"{entry.match!r} matches no trained parameter",
                wanted="a regular expression that is found in a trained parameter's name, and is not taken by an earlier group",
                do="see the names in receipts.json of an earlier run, or leave the group out",
            )
    return list(groups.values())


def _first_match(name: str, entries: list[GroupConfig]) -> tuple[int, GroupConfig | None]:
    for index, entry in enumerate(entries):
        if re.search(entry.match, name):
            return index, entry
    return -1, None
