"""[memory]: what is kept for the backward pass."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from rft.config.table import Table


class MemoryConfig(Table):
    """What is kept for the backward pass, and how much memory there is."""

    recompute: Literal["auto", "none", "full"] | PositiveInt = "auto"
    """Decoder layers that are computed again in the backward pass: `none`, `full` (all), or a number n: every n-th. `auto`: the fewest with which the run fits."""
    limit: PositiveFloat | None = None
    """GiB that a rank may use. Default: what its GPU has."""
