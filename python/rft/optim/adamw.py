"""AdamW: one kernel where weights and moments are fp32 (ours on a GPU, torch's elsewhere); else in fp32 a chunk at a time, bf16 rounded stochastically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rft.optim.rounding import Noise, store_
from rft.optim.rule import Item, chunks, local, place, scale_gradients, zeros_like

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class AdamW:
    """Moments of the weight's shape. states: their type. kernel: through kernels/adamw.py on a GPU, which clips and copies as well."""

    sharded = True
    takes_factor = True

    def __init__(
        self, betas: tuple[float, float], eps: float, states: torch.dtype = torch.float32, *, kernel: bool = False
    ):
        self.betas, self.eps, self.states, self.kernel = betas, eps, states, kernel

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros_like(weight, self.states), "exp_avg_sq": zeros_like(weight, self.states)}

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        if self.kernel:
            items = self._through_kernel(items, lr, weight_decay)
        scale_gradients(items)
        fused: list[Item] = []
        for item in items:
            if item.weight.dtype == self.states == item.gradient.dtype == torch.float32:
                fused.append(item)
            else:
                self._in_chunks(item, lr, weight_decay, noise)
        if fused:
            self._fused(fused, lr, weight_decay)

    def _through_kernel(self, items: list[Item], lr: float, weight_decay: float) -> list[Item]:
        """Update those that it serves; gives back the others."""
        from rft.kernels.adamw import Update, adamw, serves

        left: list[Item] = []
        taken: list[Update] = []
        for item in items:
            first, second = local(item.state["exp_avg"]), local(item.state["exp_avg_sq"])
            copy = None if item.copy is None else local(item.copy)
            update = Update(local(item.weight), local(item.gradient), first, second, copy, item.step)
            if item.weight.is_cuda and serves(update):
                taken.append(update)
                item.copied = copy is not None
            else:
                left.append(item)
        if taken:
            adamw(taken, lr=lr, weight_decay=weight_decay, betas=self.betas, eps=self.eps, factor=items[0].factor)
        return left

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
