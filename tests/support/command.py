"""The `rft` command in a process of its own, on a tiny model and tiny data written into one folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.data import some_chats, write_rows, write_tiny_tokenizer
from support.tiny import tiny_llama

CONFIG = """
[model]
path = "base"

[adapter]
{adapter}

[[data.train]]
path = "train.jsonl"

[data]
seq_len = 64
store = "sets"
{data}

[optim]
lr = 1e-2
schedule = {schedule}

[train]
precision = "fp32"
accumulate = 2
micro_batch = 1
{train}

[checkpoint]
{checkpoint}
"""


def write_project(
    folder: Path, rows: Iterable[dict[str, Any]] | None = None, *, adapter: str = "r = 4\ndropout = 0.1", data: str = "",
    train: str = "", checkpoint: str = "", schedule: str = '{ name = "linear", warmup_steps = 2 }', template: str | None = "",
) -> Path:  # fmt: skip
    """base/, train.jsonl and chat.toml in `folder`; returns the TOML's path. Strings are lines of that table."""
    tiny_llama(folder / "base", vocab_size=400)
    write_tiny_tokenizer(folder / "base", **({} if template == "" else {"template": template}))
    write_rows(folder / "train.jsonl", some_chats(24) if rows is None else rows)
    path = folder / "chat.toml"
    path.write_text(CONFIG.format(adapter=adapter, data=data, train=train, checkpoint=checkpoint, schedule=schedule))
    return path


class Command:
    """`rft ARGUMENTS`, started; in a process group of its own, so that a test can clear up whatever it leaves."""

    PROGRAM = (sys.executable, "-P", "-m", "rft")

    def __init__(self, *arguments: str | Path, cwd: Path, program: Sequence[str] = PROGRAM):
        command = [*program, *map(str, arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout: float = 240) -> tuple[int, str]:
        """Exit code and everything that it printed. Fails where it does not end in time."""
        try:
            out, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s: {self.process.communicate()[0]}") from None
        return self.process.returncode, out

    def kill(self) -> None:
        """kill -9 for the process and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def descendants(self) -> list[int]:
        """Living processes of its group."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found


def rft(*arguments: str | Path, cwd: Path, timeout: float = 240) -> tuple[int, str]:
    """Run to the end: exit code and output."""
    return Command(*arguments, cwd=cwd).end(timeout)


def metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of one kind; a line that is being written is left out."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if line["kind"] == kind]


def wait_for_step(run_dir: Path, step: int, command: Command, timeout: float = 120) -> None:
    """Until that step is in metrics.jsonl."""
    until = time.monotonic() + timeout
    while not any(line["step"] >= step for line in metrics(run_dir)):
        if command.process.poll() is not None:
            raise AssertionError(f"ended before step {step}: {command.end()[1]}")
        assert time.monotonic() < until, f"step {step} never came"
        time.sleep(0.005)
