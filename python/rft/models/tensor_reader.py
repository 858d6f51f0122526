"""How weights are read, whatever file they are in: by (name, slice)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Slices = tuple[slice, ...]


class TensorReader(Protocol):
    """Weights of one checkpoint under the names that the files (or, for GGUF, Hugging Face) give them."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, part: Slices | None = None) -> Tensor:
        """The tensor on the CPU, or the part of it that the slices (one a dim) cut out."""
        ...
