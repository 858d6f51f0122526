"""From a config table and trained parameters to an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft.config.optim import AdafactorConfig, AdamW8bitConfig, AdamWConfig, LionConfig, MuonConfig, OptimConfig
from rft.errors import Refused
from rft.optim.adafactor import Adafactor
from rft.optim.adamw import DTYPES, AdamW
from rft.optim.adamw_8bit import BLOCK, SMALLEST, BitsAndBytes, TorchAO
from rft.optim.groups import RuleOf, parameter_groups
from rft.optim.home import Home
from rft.optim.lion import Lion
from rft.optim.muon import Muon
from rft.optim.optimizer import AwayWeights, Optimizer
from rft.optim.rule import Rule


def build(
    named: Iterable[tuple[str, Tensor]],
    config: OptimConfig,
    *,
    compute_dtype: torch.dtype | None = None,
    keep: frozenset[str] = frozenset(),
    embeddings: frozenset[str] = frozenset(),
    head: frozenset[str] = frozenset(),
    narrow_gradients: frozenset[str] = frozenset(),
    seed: int = 0,
    kernels: bool = False,
    home: Home | None = None,
    away: AwayWeights | None = None,
) -> Optimizer:
    """The optimizer over the trained parameters. `config.lr` is decided by then.

    embeddings, head: names of embedding tables and of the output head. seed: of stochastic rounding. kernels: whether rft's own may
    be used. narrow_gradients, home, away: see Optimizer.
    Raises Refused where the library or the sharding cannot serve it.
    """
    assert config.lr != "auto", "resolve() decides optim.lr"
    listed = list(named)
    # where most of it is computed: weights that are away were read on the host
    devices = [p.device for _, p in listed]
    device = next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))
    rule_of = RULES[type(config)](config, device, embeddings | head)
    groups = parameter_groups(listed, config, config.lr, embeddings, rule_of=rule_of)
    for group in groups:
        if isinstance(group["rule"], AdamW):
            group["rule"].kernel = kernels
    _refuse_sharded(config, listed, groups)
    return Optimizer(
        groups,
        compute_dtype=compute_dtype,
        keep=keep,
        narrow_gradients=narrow_gradients,
        seed=seed,
        in_backward=config.in_backward,
        home=home,
        away=away,
    )


def _refuse_sharded(config: OptimConfig, named: list[tuple[str, Tensor]], groups: list[dict[str, Any]]) -> None:
    whole_only = any(not group["rule"].sharded for group in groups)
    if whole_only and any(isinstance(p, DTensor) for _, p in named):
        raise Refused(
            f'optim.name = "{config.name}"',
            "it works on whole weights, and these are sharded over ranks",
            wanted="adamw, lion or muon where parallel.data is shard",
            do='set parallel.data = "replicate", or optim.name = "adamw" with optim.states = "bfloat16"',
        )


def _pair(betas: list[float]) -> tuple[float, float]:
    return betas[0], betas[1]


def _adamw(config: AdamWConfig, device: torch.device, outer: frozenset[str]) -> RuleOf:
    rule = AdamW(_pair(config.betas), config.eps, DTYPES[config.states])
    return lambda name, parameter: rule


def _adamw_8bit(config: AdamW8bitConfig, device: torch.device, outer: frozenset[str]) -> RuleOf:
    betas = _pair(config.betas)
    small: Rule = AdamW(betas, config.eps)
    large: Rule = (
        TorchAO(betas, config.eps, device=device, paged=config.paged)
        if config.library == "torchao"
        else BitsAndBytes(betas, config.eps, paged=config.paged, device=device)
    )
    whole_blocks = config.library == "torchao"

    def rule_of(name: str, parameter: Tensor) -> Rule:
        count = parameter.numel()
        return small if count < SMALLEST or (whole_blocks and count % BLOCK["torchao"]) else large

    return rule_of


def _adafactor(config: AdafactorConfig, device: torch.device, outer: frozenset[str]) -> RuleOf:
    rule = Adafactor(config.decay, config.clip)
    return lambda name, parameter: rule


def _lion(config: LionConfig, device: torch.device, outer: frozenset[str]) -> RuleOf:
    rule = Lion(_pair(config.betas), DTYPES[config.states])
    return lambda name, parameter: rule


def _muon(config: MuonConfig, device: torch.device, outer: frozenset[str]) -> RuleOf:
    hidden = Muon(config.momentum, config.nesterov, config.iterations)
    others = AdamW(_pair(config.betas), config.eps)
    return lambda name, parameter: hidden if parameter.ndim >= 2 and name not in outer else others


RULES: dict[type, Callable[[Any, torch.device, frozenset[str]], RuleOf]] = {
    AdamWConfig: _adamw,
    AdamW8bitConfig: _adamw_8bit,
    AdafactorConfig: _adafactor,
    LionConfig: _lion,
    MuonConfig: _muon,
}
