"""[memory]: what is kept for the backward pass."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from rft.config.table import Table


class MemoryConfig(Table):
    """What is kept for the backward pass, and how much memory there is."""

    recompute: Literal["auto", "none", "full"] | PositiveInt = "auto"
    """Decoder layers that are computed again in the backward pass: `none`, `full` (all), or a number n: every n-th. `auto`: the fewest with which the run fits."""
    offload_states: Literal["none", "cpu", "disk"] = "none"
    """Where optimizer states, and fp32 masters of weights that are computed with in bf16, lie between steps: on the GPU, in host memory, or in files of `offload_dir`. Not sharded."""
    offload_dir: str | None = None
    """Folder for what goes to disk; its files have no name while they are used, so a crash leaves none. Default: `offload` in the run directory."""
    limit: PositiveFloat | None = None
    """GiB that a rank may use. Default: what its GPU has."""
