"""Norm of all gradients and the factor that clips to it, without the host waiting; plain tensors and DTensors in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Common norm of all gradients, fp32, on the device.

    Sharded gradients count whole: every rank gets the same norm. Parameters without a gradient are left out.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return _total_norm(gradients) if gradients else torch.zeros(())


def clip_factor(norm: Tensor, max_norm: float | Literal["none"]) -> Tensor | None:
    """What all gradients are to be multiplied by so that their common norm is at most `max_norm`: 1 where it is, on the device.

    The optimizer multiplies where it reads gradients anyway, always: a branch on the norm would make the host wait for the device.
    """
    return None if max_norm == "none" else (max_norm / (norm + 1e-6)).clamp(max=1.0)


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
