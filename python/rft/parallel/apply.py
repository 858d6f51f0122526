"""The one order in which parallelism is applied. Each part is nothing at one rank; the model never knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rft import log
from rft.parallel.fsdp import apply_fsdp, is_sharded, local_part, set_gradient_sync, whole
from rft.parallel.mesh import World
from rft.parallel.replicate import apply_replicate, gradient_reducer

__all__ = ["apply_replicate", "local_part", "parallelize", "reduce_gradients", "reshard", "whole"]

Mode = Literal["none", "replicate", "shard"]


def parallelize(
    trainee: nn.Module,
    world: World,
    mode: Mode,
    *,
    layers: Sequence[nn.Module] = (),
    compute_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the trainee over the ranks, before its weights are read; nothing at one rank.

    `replicate` changes nothing here: its replicas are made equal by `apply_replicate`, once the weights are there.
    layers: the decoder layers. compute_dtype: see `apply_fsdp`.
    """
    if world.world_size == 1 or mode == "none":
        return trainee
    if mode == "shard":
        apply_fsdp(trainee, layers, world, compute_dtype=compute_dtype)
        log.detail(
            "parallel", f"sharded over {world.world_size} ranks: {len(layers)} layers and the rest, one group each"
        )
    else:
        log.detail(
            "parallel", f"{world.world_size} replicas, gradients summed in fp32 during the last backward of a step"
        )
    return trainee


@contextmanager
def reduce_gradients(trainee: nn.Module, *, last: bool) -> Iterator[None]:
    """Around a backward: the step's last one sums the gradients over all ranks, the others add up on each.

    At the end of the last one `.grad` holds the sum (sharded: this rank's part of it). The host waits for no device.
    """
    if is_sharded(trainee):
        set_gradient_sync(trainee, last)
        yield
        return
    reducer = gradient_reducer(trainee)
    if reducer is None or not last:
        yield
        return
    reducer.arm()
    try:
        yield
    except BaseException:
        reducer.disarm()
        raise
    reducer.finish()


def reshard(trainee: nn.Module) -> None:
    """After a forward without a backward the root group is still whole: put the parameters back into shards."""
    for module in trainee.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
