"""[log]: what is shown and where it is sent."""

from __future__ import annotations

from typing import Literal

from rft.config.table import Count, Table


class LogConfig(Table):
    """Logging. Secrets come from the environment only."""

    every_steps: Count = 1
    """Steps between metric lines."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    """Where metrics are sent besides metrics.jsonl."""
    project: str = "rft"
    """Project name for the trackers."""
    name: str | None = None
    """Run name for the trackers. Default: the run directory's name."""
    tags: list[str] = []
    """Tags for the trackers."""
