"""One micro-batch, as the trainee takes it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """`micro_batch` packs end to end in one row of T tokens, each filled up to seq_len; no document crosses a pack.

    input_ids, labels, position_ids: i64 [1, T]. labels are shifted here, once: labels[t] is the target of position t, -100 = none.
    cu_seqlens: i32 [documents + 1], the fill-up of a pack being a document of its own; cu_seqlens[-1] = T.
    weights: f32 [1, T] or None (1 each). Everything else is known on the CPU, so that no step reads the device.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    weights: Tensor | None
    lengths: tuple[int, ...]
    """Length of every document, the fill-up included; they sum to T."""
    pack_tokens: tuple[int, ...]
    """Real tokens of each pack; 0 = a filler pack of weight zero."""
    num_tokens: int
    """Real tokens, without fill-up."""
    num_label_tokens: int
    """Positions with a label."""
    label_weight: float
    """Sum of the weights over labelled positions: the denominator of `next_token`."""

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def num_packs(self) -> int:
        """Packs with real tokens."""
        return sum(1 for tokens in self.pack_tokens if tokens)

    @cached_property
    def seq_idx(self) -> Tensor:
        """i32 [1, T]: number of the document of each token."""
        lengths = self.cu_seqlens.diff()
        index = torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
        return torch.repeat_interleave(index, lengths, output_size=self.input_ids.shape[1])[None]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device; copies from pinned memory to a GPU do not wait."""
        # Only in that direction: a copy to the host that is not waited for would be read before it is there.
        behind = torch.device(device).type != "cpu"
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device, non_blocking=behind) if isinstance(v, Tensor) else v for k, v in moved.items()}
        return replace(self, **moved)
