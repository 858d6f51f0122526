"""Lion (Chen et al. 2023, arXiv 2302.06675): w -= lr (sign(b1 m + (1 - b1) g) + decay w); m = b2 m + (1 - b2) g."""

from __future__ import annotations

import torch
from torch import Tensor

from rft.optim.rounding import Noise, store_
from rft.optim.rule import Item, chunks, place, zeros_like


class Lion:
    """One moment of the weight's shape. states: its type."""

    sharded = True
    takes_factor = False

    def __init__(self, betas: tuple[float, float], states: torch.dtype = torch.float32):
        self.betas, self.states = betas, states

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros_like(weight, self.states)}

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        beta1, beta2 = self.betas
        for item in items:
            generator = noise.at(item.name + place(item.weight), item.step, item.weight.device)
            for weight, gradient, moment in chunks(item.weight, item.gradient, item.state["exp_avg"]):
                w, g, m = weight.float(), gradient.float(), moment.float()
                w.mul_(1 - lr * weight_decay).add_(m.lerp(g, 1 - beta1).sign_(), alpha=-lr)
                m.lerp_(g, 1 - beta2)
                store_(weight, w, generator)
                store_(moment, m, generator)
