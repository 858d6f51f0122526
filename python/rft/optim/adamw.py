"""AdamW: fused where weights and moments are fp32; else in fp32 a chunk at a time, bf16 rounded stochastically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rft.optim.rounding import Noise, store_
from rft.optim.rule import Item, chunks, place, zeros_like

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class AdamW:
    """Moments of the weight's shape. states: their type."""

    sharded = True

    def __init__(self, betas: tuple[float, float], eps: float, states: torch.dtype = torch.float32):
        self.betas, self.eps, self.states = betas, eps, states

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros_like(weight, self.states), "exp_avg_sq": zeros_like(weight, self.states)}

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        fused: list[Item] = []
        for item in items:
            if item.weight.dtype == self.states == item.gradient.dtype == torch.float32:
                fused.append(item)
            else:
                self._in_chunks(item, lr, weight_decay, noise)
        if fused:
            self._fused(fused, lr, weight_decay)

    def _fused(self, items: list[Item], lr: float, weight_decay: float) -> None:
        common: dict[str, Any] = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}
        adamw(
            [i.weight for i in items],
            [i.gradient for i in items],
            [i.state["exp_avg"] for i in items],
            [i.state["exp_avg_sq"] for i in items],
            [],
            [i.state["step"] for i in items],
            foreach=False,
            fused=True,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            **common,
        )

    def _in_chunks(self, item: Item, lr: float, weight_decay: float, noise: Noise) -> None:
        (beta1, beta2), t = self.betas, item.step
        tensors = (item.weight, item.gradient, item.state["exp_avg"], item.state["exp_avg_sq"])
        generator = noise.at(item.name + place(item.weight), t, item.weight.device)
        for weight, gradient, first, second in chunks(*tensors):
            w, g, m, v = weight.float(), gradient.float(), first.float(), second.float()
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            w.mul_(1 - lr * weight_decay)
            denominator = v.sqrt().div_((1 - beta2**t) ** 0.5).add_(self.eps)
            w.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))
            for target, source in ((weight, w), (first, m), (second, v)):
                store_(target, source, generator)
