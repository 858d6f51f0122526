"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4) with absolute rates and decoupled decay, without momentum.

Of G^2 of a matrix only the means of rows R and of columns C are averaged; its second moment is R C / mean(R). Vectors keep theirs
whole. Leading dims (experts) are matrices of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft.optim.rounding import Noise, store_
from rft.optim.rule import Item

TINY = 1e-30
"""Added to squared gradients (the paper's eps1)."""


class Adafactor:
    """State of a matrix [.., N, K]: N + K numbers, fp32."""

    sharded = False  # means over columns cross ranks
    takes_factor = False

    def __init__(self, decay: float, clip: float):
        self.decay, self.clip = decay, clip

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        if weight.ndim < 2:
            return {"exp_avg_sq": torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)}
        rows, columns = weight.shape[:-1], (*weight.shape[:-2], weight.shape[-1])
        return {"exp_avg_sq_row": _zeros(rows, weight), "exp_avg_sq_col": _zeros(columns, weight)}

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        for item in items:
            share = item.step**-self.decay  # of the new gradient; 1 in the first step
            gradient = item.gradient.float()
            squared = gradient.square().add_(TINY)
            if gradient.ndim < 2:
                update = gradient * item.state["exp_avg_sq"].lerp_(squared, share).rsqrt()
            else:
                row = item.state["exp_avg_sq_row"].lerp_(squared.mean(-1), share)
                column = item.state["exp_avg_sq_col"].lerp_(squared.mean(-2), share)
                del squared
                of_rows = (row / row.mean(-1, keepdim=True)).rsqrt_()
                update = gradient * of_rows[..., None] * column.rsqrt()[..., None, :]
            mean_square = update.square().mean()
            update.div_((mean_square.sqrt() / self.clip).clamp_(min=1.0))
            weight = item.weight.float()
            weight.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)
            store_(item.weight, weight, noise.at(item.name, item.step, item.weight.device))


def _zeros(shape: tuple[int, ...], weight: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=weight.device)
