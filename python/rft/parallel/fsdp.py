"""FSDP2: every decoder layer is a group, and so is what is left of the trainee (embeddings, last norm, head).

Frozen base weights are sharded too: they are most of the memory of a LoRA run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rft.errors import Refused
from rft.parallel.mesh import World, data_mesh


def apply_fsdp(
    trainee: nn.Module, layers: Sequence[nn.Module], world: World, *, compute_dtype: torch.dtype | None = None
) -> nn.Module:
    """Shard `layers`, then the trainee, in place; parameter names stay. Call it before the weights are read.

    compute_dtype: trained weights that are kept in fp32 are gathered and computed with in this type, and their gradients
    reduced in fp32; None = as they are kept. Raises Refused where one group would train weights of several types.
    """
    for name, part in [*((f"layer {i}", layer) for i, layer in enumerate(layers)), ("the model", trainee)]:
        _check_one_dtype(part, name)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # inputs are hidden states in the compute type already; token weights must stay fp32
    )
    mesh = data_mesh(world)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(trainee, mesh=mesh, mp_policy=policy)
    for module in trainee.modules():
        if isinstance(module, FSDPModule):
            # The step divides by the label tokens of all ranks, so the reduction has to be a plain sum;
            # on gloo that also needs the second call (hooks.md 7).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return trainee


def _check_one_dtype(part: nn.Module, name: str) -> None:
    """FSDP2 asserts on this much later, in a forward, and without saying which parameters."""
    kinds: dict[torch.dtype, str] = {}
    for parameter_name, parameter in part.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, parameter_name)
    if len(kinds) > 1:
        shown = ", ".join(f"{key} ({dtype})" for dtype, key in kinds.items())
        raise Refused(
            "parallel.data = 'shard'",
            f"{name} trains weights of several types: {shown}",
            wanted="one type for all trained weights",
            do='set train.master = "float32", or use parallel.data = "replicate"',
        )


def set_gradient_sync(trainee: nn.Module, on: bool) -> None:
    """Whether the coming backward reduces gradients over ranks, or adds them up unsharded on each."""
    assert isinstance(trainee, FSDPModule)
    trainee.set_requires_gradient_sync(on)


def is_sharded(trainee: nn.Module) -> bool:
    """Whether `apply_fsdp` was here."""
    return isinstance(trainee, FSDPModule)


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, sharing its memory, and which slices of the whole it covers; a plain tensor is whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return parameter.to_local().detach(), slices


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered from all ranks (each calls it, in one order); a plain tensor is whole."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
