"""[checkpoint]: what is kept of the run and how it resumes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rft.config.table import Count, CountOrNone, Table


class CheckpointConfig(Table):
    """Checkpoints."""

    save_every_steps: Count | None = None
    """A checkpoint every so many steps. The last step is always saved."""
    keep_last: Count = 2
    """Newest checkpoints that stay."""
    keep_best: CountOrNone = 1
    """Checkpoints with the lowest held-out loss that stay. A new best forces a save at its step."""
    final: Literal["last", "best"] | None = None
    """Which weights `final/` holds. Default last; best under train.early_stop."""
    resume: Literal["auto", "never"] = "auto"
    """Whether a run directory that holds an unfinished run goes on."""
    signal_timeout_seconds: float = Field(30.0, gt=0, le=86_400)
    """How long a save after SIGTERM or SIGINT may take."""
