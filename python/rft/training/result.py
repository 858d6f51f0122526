"""What came of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Result:
    """What `rft.train` returns; the same numbers as metrics.jsonl, summary.json and the report."""

    run_dir: Path
    final_dir: Path
    """Adapter in PEFT's format, or the model; with tokenizer, template and model card."""
    status: Literal["finished", "stopped early", "already finished"]
    steps: int
    epochs: float
    train_loss: float | None
    """Loss of the last step that was logged."""
    eval_loss_before: float | None
    """Held-out loss before the first step."""
    eval_loss: float | None
    """Held-out loss of what `final/` holds."""
    best_step: int | None
    final_step: int
    """Step whose weights `final/` holds."""
    tokens: int
    label_tokens: int
    seconds: float
    """Time of the steps alone."""
    tokens_per_second: float | None
    mfu: float | None
    memory_peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; folders relative to the run directory."""
        return {**asdict(self), "run_dir": ".", "final_dir": self.final_dir.name}

    @classmethod
    def from_json(cls, run_dir: Path, values: dict[str, Any], *, status: str | None = None) -> Result:
        """As `to_json` wrote it, for the run in that folder."""
        known: dict[str, Any] = {name: values.get(name) for name in cls.__dataclass_fields__}
        known |= {"run_dir": run_dir, "final_dir": run_dir / "final", "status": status or known["status"]}
        return cls(**known)
