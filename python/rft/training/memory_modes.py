"""Recompute, offload and tiled MLPs put onto a model as the config says, and changed while a run goes on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rft.config.compatibility import uses_disk
from rft.config.root import Config
from rft.errors import Refused, unusable_folder
from rft.memory.disk import DiskFile
from rft.memory.host_pool import HostPool
from rft.memory.offload import Offloader
from rft.memory.plan import MemoryPlan, offloaded, recomputed
from rft.memory.recompute import apply_recompute
from rft.memory.tiled_mlp import apply_tiled_mlp
from rft.models.attention import NAME, why_not_kept
from rft.training.machine import HOST_SHARE, free_host_bytes
from rft.training.trainee import Trainee

if TYPE_CHECKING:
    from rft.training.job import Job


def save_memory(job: Job, trainee: Trainee, layers: list[torch.nn.Module], run_dir: Path | None) -> None:
    """Recompute, offload and tiled MLPs as the config says, with receipts."""
    memory, receipts = job.config.memory, job.receipts
    assert memory.recompute != "auto", "resolve() decides memory.recompute"
    assert memory.tiled_mlp != "auto", "resolve() decides memory.tiled_mlp"
    tiled, left = apply_tiled_mlp(layers, memory.tiled_mlp)
    if memory.tiled_mlp > 1:
        receipts.ask("tiled mlp")
        if not tiled and not any(decision.key == "memory.tiled_mlp" for decision in job.decisions):
            raise Refused(f"memory.tiled_mlp = {memory.tiled_mlp}", next(iter(left)), do="leave out memory.tiled_mlp")
        if tiled:
            how = f"{memory.tiled_mlp} pieces of the sequence, gradients once"
            receipts.apply("tiled mlp", tiled, len(layers), how)
        for why, count in left.items():
            receipts.decline("tiled mlp", count, why)
    close_offloader(trainee)
    offloader = None
    if memory.offload != "none":
        offloader = build_offloader(job, len(layers), offload_folder(job.config, run_dir))
        # a plain attribute: no submodule, so no parameter changes its name
        object.__setattr__(trainee, "offloader", offloader)
        receipts.apply(f"offload to {memory.offload}", offloader.num_leaving, len(layers), offloader.describe())
    of = MemoryPlan.of(job.config).recompute_layers
    weights = getattr(trainee, "weights", None)
    again = apply_recompute(layers, memory.recompute, offloader, count=of, weights=weights)
    if not again:
        return
    receipts.apply("recompute", again, len(layers), "layers keep their input and are computed again")
    if memory.recompute == "selective":
        receipts.ask("attention kept")
        no_registry = None if job.probed.attention == NAME else "this model does not take its attention from a registry"
        not_kept = no_registry or why_not_kept(job.config.model.attention, job.probed.needs.dropout)
        if not_kept:
            receipts.decline("attention kept", len(layers), not_kept)
        else:
            receipts.apply("attention kept", again, len(layers), "output and log-sum-exp; q, k and v are made again")


def close_offloader(trainee: Trainee) -> None:
    """Give back what an earlier plan of this run holds on disk."""
    earlier = getattr(trainee, "offloader", None)
    if earlier is not None:
        earlier.close()
        object.__setattr__(trainee, "offloader", None)


def build_offloader(job: Job, num_layers: int, folder: Path) -> Offloader:
    """Where layers' kept tensors go, with its share of host memory."""
    memory, world = job.config.memory, job.world
    assert memory.offload in ("cpu", "disk"), "resolve() decides memory.offload"
    if memory.offload_host is not None:
        limit = int(memory.offload_host * 2**30)
    else:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
        limit = int(HOST_SHARE * free_host_bytes() / here)
    disk = DiskFile(folder) if memory.offload == "disk" else None
    pool = HostPool(limit, pinned=world.device.type == "cuda", disk=disk)
    keep = int(memory.offload_keep * 2**30)
    plan = MemoryPlan.of(job.config)
    again = recomputed(plan.recompute, num_layers, plan.recompute_layers)
    leaving = offloaded(again, num_layers, plan.offload_layers)
    return Offloader(memory.offload, world.device, pool, num_layers, device_bytes=keep, leaving=leaving)


def offload_folder(config: Config, run_dir: Path | None = None) -> Path:
    """Where what goes to disk lies; it is made. Raises ConfigError where it cannot be, or nothing can be written there."""
    assert config.train.out is not None, "load_config() fills in train.out"
    folder = Path(config.memory.offload_dir or _default_folder(run_dir or Path(config.train.out)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise unusable_folder("memory.offload_dir", folder, error) from None
    return folder


def leave_no_folder(config: Config, run_dir: Path) -> None:
    """Remove the run's own folder for what goes to disk: its files have no names, so nothing is in it."""
    if uses_disk(config):
        with contextlib.suppress(OSError):
            _default_folder(run_dir).rmdir()


def _default_folder(run_dir: Path) -> Path:
    return run_dir / "offload"
