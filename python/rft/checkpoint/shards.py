"""A model's tensors as safetensors shards with their index, as transformers reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rft.checkpoint.files import TensorSource, write_json, write_tensors

SHARD_BYTES = 5 * 10**9
"""Largest shard, as transformers splits. One tensor may be larger: it then has a shard of its own."""


def into_shards(sources: Sequence[TensorSource], limit: int = SHARD_BYTES) -> list[list[TensorSource]]:
    """Cut a list of tensors, in its order, into shards of at most `limit` bytes."""
    shards: list[list[TensorSource]] = [[]]
    used = 0
    for source in sources:
        if shards[-1] and used + source.bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(source)
        used += source.bytes
    return shards


def write_shards(directory: Path, sources: Sequence[TensorSource], *, limit: int = SHARD_BYTES) -> None:
    """Write tensors as model*.safetensors and, where there are several files, their index; each is flushed to the disk."""
    shards = into_shards(sources, limit)
    of = len(shards)
    names = [f"model-{i:05d}-of-{of:05d}.safetensors" for i in range(1, of + 1)] if of > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(directory / name, shard, {"format": "pt"})
    if of > 1:
        total = sum(source.bytes for source in sources)
        weight_map = {source.name: name for name, shard in zip(names, shards, strict=True) for source in shard}
        write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
