"""The data path: files to prepared sets, sets to batches. `open` serves people who train with something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from rft.data.packed import PackedSet, PackedStream

__all__ = ["open"]


def open(
    path: str | Path | dict[str, Any],
    *,
    seq_len: int,
    packing: Literal["stream", "bfd", "even", "sequential", "none"] = "stream",
    overlong: Literal["split", "truncate", "drop", "error"] = "split",
    seed: int = 0,
    shuffle: bool | Literal["window"] = True,
    pad_id: int = 0,
    micro_batch: int = 1,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    arrays: Literal["torch", "numpy"] = "torch",
    streaming: bool = False,
) -> PackedSet | PackedStream:
    """A prepared set (the folder that `rft prepare` names) as packed batches.

    `for batch in rft.data.open(path, seq_len=4096).epoch(0): ...`. arrays: "numpy" gives the tensors of each batch as
    numpy arrays. shuffle: over the whole set, within windows of it, or not at all. streaming: `path` is a config (TOML) or its
    tables as a dict, whose `[model]` and `[data]` say what is prepared while it is read, shuffled in windows, and removed afterwards
    (docs/streaming.md); each process prepares for itself. Raises DataError for a folder that is no prepared set, or one that is not whole.
    """
    if streaming:
        from rft.data.packed import PackedStream

        return PackedStream(
            path,
            arrays=arrays,
            seq_len=seq_len,
            packing=packing,
            overlong=overlong,
            seed=seed,
            shuffle=bool(shuffle),
            pad_id=pad_id,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            device=device,
        )
    from rft.data.packed import PackedSet

    assert not isinstance(path, dict), "a config is for streaming"
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
