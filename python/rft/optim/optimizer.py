"""The optimizer of a run: masters beside the module's parameters, rules that update them, and where all of it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rft.optim.home import Home, Moved
from rft.optim.rounding import Noise
from rft.optim.rule import Item, Rule, local, scale_gradients

STEP = "step"


class AwayWeights(Protocol):
    """Weights that the module computes with and that lie on the host, but for the layer that is worked on (memory/weights.py)."""

    def covered(self) -> dict[int, int]:
        """id of each parameter that lies there, or will -> its layer."""
        ...

    def take(self, parameter: nn.Parameter, layer: int) -> None:
        """Move it there."""
        ...

    def changed(self, parameter: nn.Parameter) -> None:
        """Its values on the device are new."""
        ...

    def home_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Where its values lie, up to date and free to be written; None where it is on the device."""
        ...


class Optimizer:
    """Updates parameters by their group's rule, over masters that may be other tensors than the module's parameters.

    groups: {"names", "params", "lr", "weight_decay", "rule"} each; `lr` is written by the schedule.
    compute_dtype: what the module computes with, where that is narrower than its parameters. The parameters' own tensors become
    the masters, and the module gets copies in that type, refreshed after each step. Gradients are accumulated in the masters'
    type (`Tensor.grad_dtype`). So neither accumulation nor the update rounds to bf16, and no forward casts a weight. None: master
    and parameter are one tensor; then bf16 weights are rounded stochastically. keep: names of parameters that the module computes
    with as they are. narrow_gradients: names of parameters whose gradient may stay in compute_dtype, since nothing is added to it: of
    one use in the model, one micro-batch a step, one rank. in_backward: update each parameter when its gradient is complete, and free that. home: where states, and masters
    that are tensors of their own, lie between steps; None = on the parameter's device. away: where the module's own tensors of
    some parameters lie; they are updated in backward.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        compute_dtype: torch.dtype | None = None,
        keep: frozenset[str] = frozenset(),
        narrow_gradients: frozenset[str] = frozenset(),
        seed: int = 0,
        in_backward: bool = False,
        home: Home | None = None,
        away: AwayWeights | None = None,
    ):
        self.param_groups = groups
        self.in_backward = in_backward
        self.updating = False
        """Whether a step was begun and has not ended: some weights may be changed, others not."""
        self._home, self._away = home, away
        self._noise = Noise(seed)
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor]] = {}
        self._steps: dict[str, int] = {}
        self._norms: list[Tensor] = []
        layers = {} if away is None else away.covered()
        for group in groups:
            for name, parameter in zip(group["names"], group["params"], strict=True):
                narrow = parameter.dtype if name in keep or compute_dtype is None else compute_dtype
                self._parameters[name] = self._masters[name] = parameter
                if narrow != parameter.dtype:
                    self._masters[name] = master = _split(parameter, narrow, name in narrow_gradients)
                    if home is not None:
                        self._masters[name] = home.keep(master)
                if away is not None and id(parameter) in layers:
                    away.take(parameter, layers[id(parameter)])
                if in_backward:
                    parameter.register_post_accumulate_grad_hook(self._arrival(group, name))
        self._copies = [n for n, p in self._parameters.items() if self._masters[n] is not p]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's trained parameters: those that hold the gradients."""
        return list(self._parameters.values())

    def rules(self) -> dict[str, int]:
        """How many tensors each rule updates."""
        counts: dict[str, int] = {}
        for group in self.param_groups:
            name = type(group["rule"]).__name__
            counts[name] = counts.get(name, 0) + len(group["names"])
        return counts

    @torch.no_grad()
    def step(self, factor: Tensor | None = None) -> None:
        """Update every parameter that has a gradient. Those that were updated in backward have none any more.

        factor: scalar on the device by which all gradients are multiplied first (clip.py).
        """
        arrived = [
            (group, [name for name in group["names"] if self._parameters[name].grad is not None])
            for group in self.param_groups
        ]
        for group, names in arrived:  # all states first: where memory runs out here, nothing was changed yet
            for name in names:
                self._allocate(group["rule"], name)
        self.updating = True
        for group, names in arrived:
            self._update(group, names, factor)
        self.updating = False

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def norm_in_backward(self) -> Tensor:
        """Norm of the whole gradient of the backward that just ended, whose parts were freed; fp32, on the device."""
        norms, self._norms = self._norms, []
        return torch.stack(norms).norm() if norms else torch.zeros(())

    def _arrival(self, group: dict[str, Any], name: str) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
            self._update(group, [name])
            if self._away is not None:
                self._away.changed(self._parameters[name])
            parameter.grad = None

        return arrived

    def _update(self, group: dict[str, Any], names: list[str], factor: Tensor | None = None) -> None:
        if not names:
            return
        for name in names:
            self._allocate(group["rule"], name)
            self._steps[name] += 1
        if self._home is None:
            done = self._apply(group, names, self._masters, self._states, factor)
            copies = [n for n in names if self._masters[n] is not self._parameters[n] and n not in done]
            self._refresh(copies, self._masters)
            return
        # a copy on the way there, one on the way back, and one that is worked on
        for moved in self._home.visits([Moved(n, self._lying(n), self._parameters[n].device) for n in names]):
            states = {n: {k: t for k, t in tensors.items() if k} for n, tensors in moved.items()}
            masters = {n: moved[n].get("", self._masters[n]) for n in moved}
            done = self._apply(group, list(moved), masters, states, factor)
            self._refresh([n for n in moved if "" in moved[n] and n not in done], masters)

    def _lying(self, name: str) -> dict[str, Tensor]:
        """What of a parameter lies at home: its states, and under "" its master."""
        own = {"": self._masters[name]} if self._masters[name] is not self._parameters[name] else {}
        return own | {key: tensor for key, tensor in self._states[name].items() if key != STEP}

    def _apply(
        self,
        group: dict[str, Any],
        names: list[str],
        masters: dict[str, Tensor],
        states: dict[str, Any],
        factor: Tensor | None,
    ) -> set[str]:
        """Names whose copies are written already."""
        items = []
        for name in names:
            gradient = self._parameters[name].grad
            assert gradient is not None
            # a tensor of its own for the kernel, which counts it up itself: the host's count is what is kept
            state = states[name] | {STEP: self._states[name][STEP]}
            copy = None if masters[name] is self._parameters[name] else self._parameters[name].data
            items.append(Item(name, masters[name], gradient, state, self._steps[name], copy, factor=factor))
        rule: Rule = group["rule"]
        if not rule.takes_factor:
            scale_gradients(items)
        rule.update(items, group["lr"], group["weight_decay"], self._noise)
        return {item.name for item in items if item.copied}

    def _refresh(self, names: list[str], masters: dict[str, Tensor]) -> None:
        if names:
            torch._foreach_copy_([self._parameters[n] for n in names], [masters[n] for n in names])

    def named_masters(self) -> dict[str, Tensor]:
        """Every trained tensor in the type that it is kept in, detached, by its name in the trainee."""
        self._settle()
        return {name: self._lasting(name).detach() for name in self._masters}

    def _lasting(self, name: str) -> Tensor:
        """The trained tensor itself, wherever it lies."""
        parameter, master = self._parameters[name], self._masters[name]
        home = self._away.home_of(parameter) if self._away is not None and master is parameter else None
        return master if home is None else home

    @torch.no_grad()
    def load_masters(self, named: dict[str, Tensor]) -> None:
        """Take over trained tensors, and refresh the copies that the module computes with. Raises KeyError for one left out."""
        self._settle()
        for name, master in self._masters.items():
            if master.device.type != "meta":
                self._lasting(name).copy_(named[name])
        lying = {n: None if self._away is None else self._away.home_of(self._parameters[n]) for n in self._copies}
        self._refresh([n for n, home in lying.items() if home is None], self._masters)
        for name, home in lying.items():
            if home is not None:
                home.copy_(self._masters[name])

    def allocate_state(self) -> None:
        """States as before the first step where none was made yet, so that a checkpoint can be read into them."""
        for group in self.param_groups:
            for name in group["names"]:
                self._allocate(group["rule"], name)

    def _allocate(self, rule: Rule, name: str) -> None:
        if name in self._states:
            return
        parameter = self._parameters[name]
        like = (
            self._masters[name] if self._home is None else torch.empty_like(parameter, dtype=self._masters[name].dtype)
        )
        state = rule.init(like)
        if self._home is not None:
            state = {key: self._home.keep(tensor) for key, tensor in state.items()}
        # fp32 on the parameter's device, as torch's fused AdamW keeps it
        self._states[name] = {STEP: torch.zeros((), dtype=torch.float32, device=local(parameter).device), **state}
        self._steps[name] = 0

    def named_state(self) -> dict[str, Tensor]:
        """States and step counts as "<parameter>::<key>"; empty before the first step."""
        self._settle()
        for name, steps in self._steps.items():
            self._states[name][STEP].fill_(steps)
        return {f"{n}::{key}": tensor for n, state in self._states.items() for key, tensor in state.items()}

    @torch.no_grad()
    def load_named_state(self, named: dict[str, Tensor]) -> None:
        """Take over states and step counts. Raises KeyError for one left out."""
        self.allocate_state()
        for name, tensor in self.named_state().items():
            tensor.copy_(named[name])
        self.state_was_loaded()

    def state_was_loaded(self) -> None:
        """The tensors of `named_state` were written to: take over what they say of steps. The host waits for the device once."""
        for name, state in self._states.items():
            self._steps[name] = int(state[STEP])

    def state_bytes(self) -> int:
        """Bytes of states and of masters that are tensors of their own, wherever they lie; this rank's part."""
        own = [self._masters[name] for name in self._copies]
        held = [*own, *(t for state in self._states.values() for t in state.values())]
        return sum(local(t).numel() * t.element_size() for t in held)

    def _settle(self) -> None:
        """Wait until what is on the way home is there."""
        if self._home is not None:
            self._home.settle()


def _split(parameter: nn.Parameter, compute_dtype: torch.dtype, narrow_gradient: bool) -> Tensor:
    """The parameter's tensor as a master of its own; the parameter itself becomes a copy in `compute_dtype`."""
    master = parameter.detach().requires_grad_()
    parameter.data = master.detach().to(compute_dtype)
    parameter.grad_dtype = compute_dtype if narrow_gradient else master.dtype
    return master
