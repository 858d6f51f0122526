"""AdamW over fp32 masters: fused, with weight decay on matrices only and rates of their own by parameter name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rft.config.optim import AdamWConfig, GroupConfig
from rft.errors import ConfigError

STATE_KEYS = ("exp_avg", "exp_avg_sq", "step")


def decays(name: str, parameter: Tensor, embeddings: frozenset[str]) -> bool:
    """Whether weight decay belongs on it: matrices, but neither norms and biases (1-D) nor embedding tables."""
    return parameter.ndim >= 2 and name not in embeddings


def parameter_groups(
    named: Iterable[tuple[str, Tensor]], config: AdamWConfig, lr: float, embeddings: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Groups of equal rate and decay, each {"names", "params", "lr", "weight_decay"}.

    A `[[optim.groups]]` entry takes every parameter whose name it matches (the first match counts); its own weight_decay holds
    for all of these. Raises ConfigError for an entry that matches nothing: it would silently do nothing.
    """
    groups: dict[tuple[int, float, float], dict[str, Any]] = {}
    matched: set[int] = set()
    for name, parameter in named:
        index, special = _first_match(name, config.groups)
        matched.add(index)
        rate = special.lr if special and special.lr is not None else lr
        decay = config.weight_decay if decays(name, parameter, embeddings) else 0.0
        if special and special.weight_decay is not None:
            decay = special.weight_decay
        group = groups.setdefault((index, rate, decay), {"names": [], "params": [], "lr": rate, "weight_decay": decay})
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


class Optimizer:
    """Fused AdamW whose masters may be other tensors than the module's parameters.

    compute_dtype: what the module computes with, where that is narrower than its parameters. The parameters' own tensors become
    the masters, and the module gets copies in that type, refreshed after each step. Gradients are accumulated in the masters'
    type (`Tensor.grad_dtype`). So neither accumulation nor the update rounds to bf16, and no forward casts a weight. None: master
    and parameter are one tensor. keep: names of parameters that the module computes with as they are.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float],
        eps: float,
        compute_dtype: torch.dtype | None = None,
        keep: frozenset[str] = frozenset(),
    ):
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}
        inner_groups = []
        for group in groups:
            masters = []
            for name, parameter in zip(group["names"], group["params"], strict=True):
                narrow = None if name in keep else compute_dtype
                self._parameters[name] = parameter
                self._masters[name] = parameter if narrow in (None, parameter.dtype) else _split(parameter, narrow)
                masters.append(self._masters[name])
            inner_groups.append({**group, "params": masters, "names": list(group["names"])})
        self._copies = [n for n, p in self._parameters.items() if self._masters[n] is not p]
        self.inner = torch.optim.AdamW(inner_groups, betas=betas, eps=eps, fused=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's trained parameters: those that hold the gradients."""
        return list(self._parameters.values())

    @torch.no_grad()
    def step(self) -> None:
        for name in self._copies:
            self._masters[name].grad = self._parameters[name].grad
        self.inner.step()
        self._refresh_copies()

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        for name in self._copies:
            self._masters[name].grad = None

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        if self._copies:
            torch._foreach_copy_([self._parameters[n] for n in self._copies], [self._masters[n] for n in self._copies])

    def named_masters(self) -> dict[str, Tensor]:
        """Every trained tensor in the type that it is kept in, detached, by its name in the trainee."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load_masters(self, named: dict[str, Tensor]) -> None:
        """Take over trained tensors, and refresh the copies that the module computes with. Raises KeyError for one left out."""
        for name, master in self._masters.items():
            if master.device.type != "meta":
                master.copy_(named[name])
        self._refresh_copies()

    def allocate_state(self) -> None:
        """Moments of zero and step 0 where no step was made yet, so that a checkpoint can be read into them."""
        for master in self._masters.values():
            state = self.inner.state[master]
            if not state:
                # As torch's fused AdamW makes them itself: `step` is fp32 on the parameter's device.
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)

    def named_state(self) -> dict[str, Tensor]:
        """Moments and step counts as "<parameter>::<key>"; empty before the first step."""
        return {
            f"{name}::{key}": self.inner.state[master][key]
            for name, master in self._masters.items()
            if master in self.inner.state
            for key in STATE_KEYS
        }

    @torch.no_grad()
    def load_named_state(self, named: dict[str, Tensor]) -> None:
        """Take over moments and step counts. Raises KeyError for one left out."""
        self.allocate_state()
        for name, tensor in self.named_state().items():
            tensor.copy_(named[name])


def _split(parameter: nn.Parameter, compute_dtype: torch.dtype) -> Tensor:
    """The parameter's tensor as a master of its own; the parameter itself becomes a copy in `compute_dtype`."""
    master = parameter.detach().requires_grad_()
    parameter.data = master.detach().to(compute_dtype)
    parameter.grad_dtype = master.dtype
    return master


def build_adamw(
    named: Iterable[tuple[str, Tensor]],
    config: AdamWConfig,
    *,
    compute_dtype: torch.dtype | None = None,
    keep: frozenset[str] = frozenset(),
    embeddings: frozenset[str] = frozenset(),
) -> Optimizer:
    """AdamW over the trained parameters. `config.lr` is decided by then; `embeddings`: names of embedding tables."""
    assert config.lr != "auto", "resolve() decides optim.lr"
    groups = parameter_groups(named, config, config.lr, embeddings)
    beta1, beta2 = config.betas
    return Optimizer(groups, betas=(beta1, beta2), eps=config.eps, compute_dtype=compute_dtype, keep=keep)
