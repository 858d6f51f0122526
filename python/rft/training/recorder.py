"""Where a run's numbers go: metrics.jsonl, the terminal, trackers."""

from __future__ import annotations

import json
from typing import Any

from rft import log
from rft.training.flops import peak_flops
from rft.training.live import Progress
from rft.training.metrics import Meter, MetricsFile, check_sums
from rft.training.run import Run
from rft.training.step import StepResult
from rft.training.trackers import Tracker, open_trackers, values_of


class Recorder:
    """Open while a run trains. Every rank has one, since the numbers are sums over ranks; the first writes and shows them."""

    def __init__(self, run: Run):
        self._run = run
        self._every = run.config.log.every_steps
        self.progress = Progress(run.total_steps, run.state.step, shown=run.is_main)
        resumed = None if run.saved_step is None else run.state.step
        self._file = MetricsFile(run.run_dir / "metrics.jsonl", resumed) if run.is_main else None
        self._trackers: list[Tracker] = []
        peak = peak_flops(run.device_name, run.config.train.precision) if run.device.type == "cuda" else None
        self._meter = Meter(run, peak, self._train_line)
        if self._file is not None and resumed is not None:
            check_sums(self._file.kept, run.state.tokens)
        before = [line for line in self._file.kept if line.get("kind") == "train"] if self._file is not None else []
        self.last_train: dict[str, Any] = before[-1] if before else {}
        """The last train line, also of an earlier process of the run."""
        self.mfu: float | None = None
        """Of all steps that were logged since this process started."""
        self.memory_peak_bytes = max((line.get("memory_peak_bytes", 0) for line in before), default=0)
        self._seconds = 0.0

    def __enter__(self) -> Recorder:
        run = self._run
        if run.is_main:
            settings = flatten(json.loads(log.mask(run.config.model_dump_json())))
            self._trackers = open_trackers(run.config.log, run.run_dir, run.state.run_id, settings)
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.close()
        for tracker in self._trackers:
            tracker.close()
        if self._file is not None:
            self._file.close()

    def step_begins(self, data_seconds: float) -> None:
        self._meter.step_begins(data_seconds)

    def step_done(self, result: StepResult) -> None:
        step = self._run.state.step
        self._meter.step_done(step, self._run.epochs_done, result)
        if step % self._every == 0 or step == self._run.total_steps:
            self._meter.log()

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._meter.add_seconds(phase, seconds)

    def flush(self) -> None:
        """Every step up to now is written and checked. Raises TrainingError for numbers that are useless."""
        self._meter.flush()

    def evaluation(self, line: dict[str, Any]) -> None:
        self._meter.add_seconds("eval", line["seconds"]["eval"])
        self._write(line)
        self.progress.evaluation(line)

    def _train_line(self, line: dict[str, Any]) -> None:
        self.last_train = line
        self.memory_peak_bytes = max(self.memory_peak_bytes, line["memory_peak_bytes"])
        if line["mfu"] is not None:
            seconds = line["seconds"]["step"]
            self.mfu = ((self.mfu or 0.0) * self._seconds + line["mfu"] * seconds) / (self._seconds + seconds)
            self._seconds += seconds
        self._write(line)
        self.progress.train(line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(line)
        for tracker in self._trackers:
            tracker.log(values_of(line), line["step"])


def flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
