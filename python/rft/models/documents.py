"""Where the documents of a packed row are, and what a model's attention asked for: what the dispatcher and its backends share.

Shapes: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor


class PackedBatch(Protocol):
    """What a forward needs of `rft.data.batch.Batch` (a layer above)."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...
    @property
    def cu_seqlens(self) -> Tensor: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def pack_tokens(self) -> tuple[int, ...]: ...
    @property
    def max_length(self) -> int: ...
    @property
    def seq_idx(self) -> Tensor: ...


@dataclass(frozen=True)
class Documents:
    """Where the documents of one row begin and end, on the CPU and on the device."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    """i32 [documents + 1] on the device of the batch."""

    @staticmethod
    def of(batch: PackedBatch) -> Documents:
        return Documents(batch.lengths, batch.cu_seqlens)

    @staticmethod
    def from_lengths(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Documents:
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        if torch.device(device).type == "cuda":
            ends = ends.pin_memory().to(device, non_blocking=True)  # the host does not wait
        return Documents(tuple(lengths), ends)

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def made(self) -> dict[Any, Any]:
        """What backends have made of the borders, for all layers of a forward and its backward."""
        return {}

    def chunked(self, size: int) -> Documents:
        """Every document cut into pieces of `size` tokens: what chunked attention lets see each other."""
        key = ("chunked", size)
        if key not in self.made:
            pieces = tuple(min(size, n - at) for n in self.lengths for at in range(0, n, size))
            self.made[key] = Documents.from_lengths(pieces, self.cu_seqlens.device)
        return self.made[key]


@dataclass(frozen=True)
class DocumentMask:
    """Stands in for the attention mask of one forward: which documents, and how far a token sees in its own."""

    documents: Documents
    window: int | None = None
    chunk: int | None = None


@dataclass
class Needs:
    """What a model's attention layers asked for, as seen in calls."""

    softcap: bool = False
    sinks: bool = False
    window: bool = False
    chunk: bool = False
    dropout: float = 0.0
    head_size: int = 0
    value_size: int = 0

    def summary(self) -> str:
        words = [w for w in ("softcap", "sinks", "window", "chunk") if getattr(self, w)]
        return ", ".join(words) or "plain causal attention"
