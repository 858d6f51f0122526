"""[parallel]: how several processes share the work."""

from __future__ import annotations

from typing import Literal

from rft.config.table import Table


class ParallelConfig(Table):
    """Several processes."""

    data: Literal["auto", "replicate", "shard"] = "auto"
    """`replicate` = a whole model a process; `shard` = FSDP2. auto: replicate where weights, gradients and optimizer states take under 60 % of the GPU."""
