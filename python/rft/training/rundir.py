"""The run directory's files beside checkpoints, metrics and `final/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rft import log
from rft.config.show import to_toml
from rft.data.prepare import report_with_plan
from rft.training.run import Run

CONFIG, RECEIPTS, DATA, PLAN = "config.resolved.toml", "receipts.json", "data.json", "plan.json"


def write_run_files(run: Run) -> None:
    """config.resolved.toml, receipts.json and data.json; the last one's report with the packs of the first epoch."""
    reasons = {decision.key: decision.reason for decision in run.decisions}
    (run.run_dir / CONFIG).write_text(log.mask(to_toml(run.config, reasons)), encoding="utf-8")
    write_json(run.run_dir / RECEIPTS, run.receipts)
    if run.planned is not None:
        write_json(run.run_dir / PLAN, {"planned": run.planned.to_json()})
    if run.prepared is not None:
        write_json(run.run_dir / DATA, report_with_plan(run.prepared.report, run.loader, run.eval_loader))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
