"""The data path: files to prepared sets, sets to batches. `open` serves people who train with something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from rft.data.packed import PackedSet

__all__ = ["open"]


def open(
    path: str | Path,
    *,
    seq_len: int,
    packing: Literal["stream", "bfd", "even", "sequential", "none"] = "stream",
    overlong: Literal["split", "truncate", "drop", "error"] = "split",
    seed: int = 0,
    shuffle: bool = True,
    pad_id: int = 0,
    micro_batch: int = 1,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    arrays: Literal["torch", "numpy"] = "torch",
) -> PackedSet:
    """A prepared set (the folder that `rft prepare` names) as packed batches.

    `for batch in rft.data.open(path, seq_len=4096).epoch(0): ...`. arrays: "numpy" gives the tensors of each batch as
    numpy arrays. Raises DataError for a folder that is no prepared set, or one that is not whole.
    """
    from rft.data.packed import PackedSet

    return PackedSet(
        path,
        arrays=arrays,
        seq_len=seq_len,
        packing=packing,
        overlong=overlong,
        seed=seed,
        shuffle=shuffle,
        pad_id=pad_id,
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        device=device,
    )
