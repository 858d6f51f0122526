"""Muon (Jordan et al. 2024) for hidden matrices: the momentum's singular values are brought near 1 by a Newton-Schulz iteration.

Updates are scaled by 0.2 sqrt(max(N, K)), which gives them the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one rate
serves both. Every rank gathers a sharded momentum whole for the iteration and keeps its part of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rft.optim.rounding import Noise, store_
from rft.optim.rule import Item, local, place, zeros_like

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, X X^T X and its next power: steepest at 0 while singular values stay in 0.7 .. 1.2 (Jordan et al.)."""


def orthogonalised(matrix: Tensor, iterations: int) -> Tensor:
    """U V^T of the matrix's U S V^T, roughly. [.., N, K], of which the last two dims are a matrix. In bf16 on CUDA, fp32 on a CPU."""
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """One moment of the weight's shape, in its type or fp32."""

    sharded = True
    takes_factor = False

    def __init__(self, momentum: float, nesterov: bool, iterations: int):
        self.momentum, self.nesterov, self.iterations = momentum, nesterov, iterations

    def init(self, weight: Tensor) -> dict[str, Tensor]:
        return {"momentum": zeros_like(weight, torch.float32)}

    def update(self, items: list[Item], lr: float, weight_decay: float, noise: Noise) -> None:
        for item in items:
            gradient, moment = item.gradient.float(), item.state["momentum"]
            moment.lerp_(gradient, 1 - self.momentum)
            update = _orthogonal_part(
                gradient.lerp(moment, self.momentum) if self.nesterov else moment, self.iterations
            )
            scale = 0.2 * max(item.weight.shape[-2:]) ** 0.5
            target = local(item.weight)
            weight = target.float()
            weight.mul_(1 - lr * weight_decay).add_(update.float(), alpha=-lr * scale)
            store_(target, weight, noise.at(item.name + place(item.weight), item.step, target.device))


def _orthogonal_part(matrix: Tensor, iterations: int) -> Tensor:
    """This rank's part of the orthogonalised whole."""
    if not isinstance(matrix, DTensor):
        return orthogonalised(matrix, iterations)
    whole = orthogonalised(matrix.full_tensor(), iterations)
    mesh = matrix.device_mesh
    spread = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return spread.redistribute(placements=matrix.placements).to_local()
