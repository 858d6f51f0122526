"""Norm of all gradients and clipping to it, without the host waiting; plain tensors and DTensors in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float | Literal["none"]) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before that, fp32, on the device.

    Sharded gradients count whole: every rank gets the same norm. Parameters without a gradient are left out.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = _total_norm(gradients)
    if max_norm != "none":
        # Always multiplied (by 1 where the norm is small): a branch on the norm would make the host wait for the device.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
        for same in _by_dtype(local):
            torch._foreach_mul_(same, scale.to(same[0].dtype))
    return norm


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm over plain and sharded gradients: a norm for each mesh, then the norm of these."""
    sharded = [grad for grad in gradients if isinstance(grad, DTensor)]
    plain = [grad for grad in gradients if not isinstance(grad, DTensor)]
    norms = []
    if plain:
        norms.append(_plain_norm(plain))
    if sharded:
        norm = torch.nn.utils.get_total_norm(sharded)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms[0].float() if len(norms) == 1 else torch.stack([norm.float() for norm in norms]).norm()


def _plain_norm(gradients: list[Tensor]) -> Tensor:
    norms = [norm for same in _by_dtype(gradients) for norm in torch._foreach_norm(same, 2, torch.float32)]
    return torch.stack(norms).norm()


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
