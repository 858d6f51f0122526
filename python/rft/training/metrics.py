"""metrics.jsonl: one object a line. The device is read one line late, so that logging every step leaves it busy."""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rft import log
from rft.errors import TrainingError
from rft.losses import NEXT_TOKEN
from rft.models.finite import useless_numbers
from rft.parallel.collectives import sum_tensor_over_ranks
from rft.training.trackers import NUMBERS

if TYPE_CHECKING:
    from rft.models.source import ModelSource
    from rft.training.evaluate import Evaluation
    from rft.training.run import Run
    from rft.training.step import StepResult


class MetricsFile:
    """Appends lines that are on disk whole or not at all; drops what a killed run wrote beyond the step it resumes from."""

    def __init__(self, path: Path, resume_step: int | None):
        """resume_step: the run goes on after that step; None = it starts, and what is there is of no use."""
        self.kept = _keep_up_to(path, resume_step)
        """Lines of the steps that are not run again."""
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_up_to(path: Path, step: int | None) -> list[dict[str, Any]]:
    """Drop torn lines, and lines of steps that will be run again; returns the others. Lines that no kill leaves are told."""
    if not path.exists():
        return []
    if step is None:
        path.unlink()
        return []
    kept, lines = [], []
    damaged: list[str] = []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            line = None
        if not is_metrics_line(line):
            if number < len(texts):  # the last line has no end: torn by what killed the run
                damaged.append(str(number))
        elif line["step"] <= step:
            kept.append(text)
            lines.append(line)
    if damaged:
        shown = ", ".join(damaged[:5]) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        log.warn(f"{path.name}: line {shown} is not as rft writes it and is left out: the curves have a gap there")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(text + "\n" for text in kept), encoding="utf-8")
    os.replace(temporary, path)
    return lines


def is_metrics_line(line: Any) -> bool:
    """Whether it is a line as a run writes it: an object with a step, whose numbers are numbers. Other kinds may follow later."""
    if not isinstance(line, dict) or type(line.get("step")) is not int or not isinstance(line.get("kind"), str):
        return False
    return all(type(line[key]) in (int, float) for key in NUMBERS if line.get(key) is not None) and isinstance(
        line.get("seconds", {}), dict
    )


def check_sums(lines: Iterable[dict[str, Any]], tokens: int) -> None:
    """Say so where the lines do not account for the tokens that the checkpoint counts: some are missing, or were changed."""
    accounted = sum(int(line.get("tokens") or 0) for line in lines if line["kind"] == "train")
    if accounted != tokens:
        log.warn(
            f"metrics.jsonl accounts for {accounted:,} of the {tokens:,} tokens that this run was trained on: lines are "
            "missing or were changed, and the curves with them",
        )


class StepClock:
    """Time of steps alone: events on a CUDA device, read once it has passed them; the host's clock elsewhere."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that the device has passed."""
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start


@dataclass
class _StepRecord:
    """One step that was made and not logged yet."""

    step: int
    epoch: float
    result: StepResult
    data_seconds: float
    start: Any
    end: Any


@dataclass
class _Pending:
    """A line whose numbers are on their way from the device."""

    records: list[_StepRecord]
    values: Tensor
    """[steps, terms + 1]: normalised terms and the gradient norm of each step, over all ranks."""
    memory_peak_bytes: int
    ready: Any = None
    """CUDA event behind the copy to the host; None where the numbers are there."""


class Meter:
    """Collects steps, turns them into lines, and stops the run where the numbers say that it cannot go on.

    A line covers all steps since the one before: loss per labelled token over them all, tokens and seconds their sums.
    """

    def __init__(self, run: Run, peak_flops: float | None, on_line: Callable[[dict[str, Any]], None]):
        self._run, self._peak, self._on_line = run, peak_flops, on_line
        self._clock = StepClock(run.device)
        self._steps: list[_StepRecord] = []
        self._pending: _Pending | None = None
        self._start: Any = None
        self._data_seconds = 0.0
        self._other_seconds: dict[str, float] = {}
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)

    def step_begins(self, data_seconds: float) -> None:
        """The data of a step is there, after the host waited that long for it."""
        self._data_seconds, self._start = data_seconds, self._clock.now()

    def step_done(self, step: int, epoch: float, result: StepResult) -> None:
        end = self._clock.now()
        self._steps.append(_StepRecord(step, epoch, result, self._data_seconds, self._start, end))

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Time of something beside steps ("eval", "checkpoint"); it goes into the next line."""
        self._other_seconds[phase] = self._other_seconds.get(phase, 0.0) + seconds

    def log(self) -> None:
        """Send the numbers of the steps since the last line on their way, and write the line before that one."""
        if not self._steps:
            return
        sent = self._send(self._steps)
        self._steps = []
        self._write_pending()
        self._pending = sent
        if self._run.device.type != "cuda":
            self._write_pending()  # nothing to overlap with

    def flush(self) -> None:
        """Everything up to now is written and checked."""
        self.log()
        self._write_pending()

    def _send(self, records: list[_StepRecord]) -> _Pending:
        rows = []
        for record in records:
            # The gradient norm is the same on every rank: the sum over ranks must give it once.
            norm = record.result.grad_norm.to(self._run.device) / self._run.world_size
            rows.append(torch.stack([*record.result.terms.values(), norm]))
        values = sum_tensor_over_ranks(torch.stack(rows), self._run.data_group)
        if self._run.device.type != "cuda":
            return _Pending(records, values, _peak_resident_bytes())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        return _Pending(records, host, torch.cuda.max_memory_allocated(self._run.device), self._clock.now())

    def _write_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.ready is not None:
            pending.ready.synchronize()
        seconds = [self._clock.seconds(record.start, record.end) for record in pending.records]
        line = self._line(pending, sum(seconds))
        _refuse_bad_numbers(pending, list(self._run.losses.terms), self._run.source)
        state = self._run.state
        state.seconds += line["seconds"]["step"]
        self._on_line(line)

    def _line(self, pending: _Pending, seconds: float) -> dict[str, Any]:
        last = pending.records[-1]
        line: dict[str, Any] = {"kind": "train", "step": last.step, "epoch": round(last.epoch, 6)}
        for index, term in enumerate(self._run.losses.terms):
            weights = [record.result.counts[term] for record in pending.records]
            total = sum(v * w for v, w in zip(pending.values[:, index].tolist(), weights, strict=True) if w)
            line["loss" if term == NEXT_TOKEN else f"{term}_loss"] = total / sum(weights) if sum(weights) else None
        tokens = sum(record.result.counts["tokens"] for record in pending.records)
        flops = sum(record.result.counts["flops"] for record in pending.records)
        devices = self._run.world_size
        line |= {
            "grad_norm": pending.values[-1, -1].item(),
            "lr": last.result.lr,
            "tokens": int(tokens),
            "label_tokens": int(sum(record.result.counts["label_tokens"] for record in pending.records)),
            "tokens_per_second": tokens / seconds,
            "mfu": flops / seconds / (self._peak * devices) if self._peak and flops else None,
            "memory_peak_bytes": pending.memory_peak_bytes,
            "seconds": {"step": seconds, "data": sum(r.data_seconds for r in pending.records), **self._other_seconds},
        }
        self._other_seconds = {}
        return line


def _refuse_bad_numbers(pending: _Pending, terms: list[str], source: ModelSource | None) -> None:
    """Raises TrainingError for a loss that is not finite, and for gradients that are all zero; ModelError for base weights."""
    for record, values in zip(pending.records, pending.values.tolist(), strict=True):
        names = ["loss" if term == NEXT_TOKEN else term.replace("_", " ") for term in terms]
        named = dict(zip([*names, "gradient norm"], values, strict=True))
        for name, value in named.items():
            if not math.isfinite(value):
                raise useless_numbers(
                    source,
                    f"the {name} is {value}: the weights of this step are useless",
                    where=f"step {record.step}",
                    do='lower optim.lr, or try train.precision = "fp32"; run again to go on from the last checkpoint',
                )
        if named["gradient norm"] == 0.0 and record.result.counts[NEXT_TOKEN]:
            raise TrainingError(
                f"step {record.step}",
                "every gradient is exactly zero: nothing is being trained",
                do="check adapter.targets and optim.groups; `rft verify` with this config finds the broken part",
            )


def eval_line(step: int, epoch: float, evaluation: Evaluation) -> dict[str, Any]:
    """The line of one pass over the held-out set."""
    return {
        "kind": "eval",
        "step": step,
        "epoch": round(epoch, 6),
        "loss": evaluation.loss,
        "tokens": evaluation.tokens,
        "label_tokens": evaluation.label_tokens,
        "seconds": {"eval": evaluation.seconds},
    }


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
