"""This process among the others: rank, device, and the one group that carries CPU and device tensors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rft.errors import ConfigError
from rft.ranks import read_ranks

# Ranks meet in a collective only after everyone is through loading weights and, on a cold store, the first one is through
# preparing data; a rank that *fails* is ended by the launcher long before this.
COLLECTIVE_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class World:
    """Who this process is. One process: rank 0 of 1 and no group."""

    rank: int
    world_size: int
    local_rank: int
    """Rank on this machine: also the number of its GPU."""
    device: torch.device
    group: dist.ProcessGroup | None
    """CPU tensors go over gloo, CUDA tensors over NCCL. None for one process."""


def join_world(device: str | None = None) -> World:
    """Join the other processes as the launcher's environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) says.

    device: "cpu", "cuda", or None = cuda where there is one. Raises ConfigError where the environment is none
    that a launcher makes, and where a process has no GPU of its own.
    """
    ranks = read_ranks()
    rank, world_size, local_rank = ranks.rank, ranks.world_size, ranks.local_rank
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ConfigError(
                "launch",
                f"process {local_rank} of this machine has no GPU: {count} are visible",
                wanted="at most one process per visible GPU",
                do=f"start {max(count, 1)} processes, or make more GPUs visible with CUDA_VISIBLE_DEVICES",
            )
        own = torch.device("cuda", local_rank)
        torch.cuda.set_device(own)
    else:
        own = torch.device("cpu")
    if world_size == 1:
        return World(rank=0, world_size=1, local_rank=local_rank, device=own, group=None)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    return World(rank=rank, world_size=world_size, local_rank=local_rank, device=own, group=dist.group.WORLD)


def leave_world() -> None:
    """Leave the group, if this process is in one. The others must be through with their collectives."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def data_mesh(world: World) -> DeviceMesh:
    """The mesh over which FSDP2 shards: one axis, "data", over all ranks."""
    return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("data",))
