"""Which ways to save memory this version can carry out: what the planner may choose for an `auto`, from fast to small."""

from __future__ import annotations

from typing import Literal

from rft.memory.plan import Place

RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
LEVELS = 8
"""Numbers of layers that are computed again, or offloaded, which are tried at first; those between them follow."""
OFFLOAD: tuple[Place, ...] = ("none", "cpu", "disk")
"""Tried where `memory.offload = "auto"`."""
TILES: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
"""Tiles of an MLP that are tried where `memory.tiled_mlp = "auto"`."""
