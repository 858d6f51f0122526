"""[loss]: the loss head."""

from __future__ import annotations

from typing import Literal

from rft.config.table import Count, Table


class LossConfig(Table):
    """Next-token cross entropy; the logits are never held whole."""

    chunk_rows: Count | Literal["auto", "least"] = "auto"
    """Labelled tokens whose logits exist at one time. `auto`: the fastest. `least`: on CUDA at most 0.1 GiB of logits and sums."""
