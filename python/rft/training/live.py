"""What the terminal shows while a run trains: one live line at the bottom, or plain lines where nobody watches."""

from __future__ import annotations

import time
from typing import Any

from rich.live import Live
from rich.text import Text

from rft import log
from rft.words import counted

BAR_WIDTH = 20
PLAIN_SECONDS = 10.0
"""Plain lines come at most this often; metrics.jsonl has every step."""


class Progress:
    """Shows lines of metrics as they come. `shown = False` on every rank but the first."""

    def __init__(self, total_steps: int, step: int, *, shown: bool):
        self._total, self._step, self._shown = total_steps, step, shown
        self._eval_note = ""
        self._train: dict[str, Any] = {}
        self._seconds_a_step = 0.0
        self._last_plain = float("-inf")
        self._last_evaluating = float("-inf")
        self._live: Live | None = None
        if shown and log.is_terminal():
            self._live = Live(Text(""), console=log.console(), auto_refresh=False, transient=True)
            self._live.start(refresh=True)

    def train(self, line: dict[str, Any]) -> None:
        """A line of training steps."""
        steps = line["step"] - self._step
        seconds = sum(line["seconds"].get(phase, 0.0) for phase in ("step", "data")) / max(steps, 1)
        # Smoothed, so that "left" does not jump with the length of single packs.
        self._seconds_a_step = 0.8 * self._seconds_a_step + 0.2 * seconds if self._seconds_a_step else seconds
        self._step, self._train = line["step"], line
        self._show(force=line["step"] in (1, self._total))

    def evaluation(self, line: dict[str, Any]) -> None:
        """A line of a finished evaluation."""
        self._eval_note = f"eval {line['loss']:.3f} (step {line['step']})"
        if not self._shown:
            return
        if self._live is None:
            log.line(f"held-out loss {line['loss']:.4f} after step {line['step']}")
        else:
            self._show(force=True)

    def evaluating(self, done: int, total: int) -> None:
        """An evaluation is under way; called with 0 as it begins. Where nobody watches, long ones say so now and then."""
        if self._live is not None:
            self._live.update(Text(f"evaluating {done}/{total}  {self._words()}"), refresh=True)
        elif self._shown:
            now = time.monotonic()
            if done == 0:
                self._last_evaluating = now
                if not self._eval_note:  # nothing has been shown since the weights were read
                    when = f"after step {self._step}" if self._step else "before the first step"
                    log.line(f"evaluating the held-out rows {when}: {counted(total, 'batch')}")
            elif done < total and now - self._last_evaluating >= PLAIN_SECONDS:
                self._last_evaluating = now
                log.line(f"evaluating {done:,}/{total:,}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, *, force: bool) -> None:
        if not self._shown:
            return
        if self._live is not None:
            self._live.update(self._bar(), refresh=True)
            return
        now = time.monotonic()
        if force or now - self._last_plain >= PLAIN_SECONDS:
            self._last_plain = now
            log.line(f"step {self._step}/{self._total}  {self._words()}")

    def _bar(self) -> Text:
        done = round(BAR_WIDTH * self._step / max(self._total, 1))
        width = len(str(self._total))
        text = Text(f"step {self._step:>{width}}/{self._total} ")
        text.append("━" * done, style="green").append("━" * (BAR_WIDTH - done), style="bright_black")
        return text.append(f" {self._words()}")

    def _words(self) -> str:
        line = self._train
        if not line:
            return self._eval_note
        loss = "none" if line["loss"] is None else f"{line['loss']:.3f}"
        parts = [f"loss {loss}", f"grad {line['grad_norm']:.2f}", f"lr {short_rate(line['lr'])}"]
        parts.append(f"{line['tokens_per_second']:,.0f} tok/s")
        parts.append(f"{100 * line['mfu']:.0f} % MFU" if line["mfu"] else f"label {label_share(line):.0f} %")
        parts.append(f"{line['memory_peak_bytes'] / 2**30:.1f} GiB")
        parts.append(f"left {clock(self._seconds_a_step * (self._total - self._step))}")
        if self._eval_note:
            parts.append(f" {self._eval_note}")
        return "  ".join(parts)


def label_share(line: dict[str, Any]) -> float:
    """Percent of the tokens that carry a label."""
    return 100.0 * line["label_tokens"] / line["tokens"] if line["tokens"] else 0.0


def short_rate(rate: float) -> str:
    """1.4e-4 rather than 1.4e-04."""
    if not rate:
        return "0"
    mantissa, exponent = f"{rate:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def clock(seconds: float) -> str:
    """3:51, or 2:03:51."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """4 min 52 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
