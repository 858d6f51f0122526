"""How long `rft --help`, `config show`, `doctor` and the refusal of a wrong option take, as whole processes."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import Results

ROOT = Path(__file__).resolve().parents[2]
CONFIG = '[model]\npath = "org/model"\n[[data.train]]\npath = "rows.jsonl"\n'
COMMANDS = {  # case -> (command, text of chat.toml, exit status)
    "ease/help": (["--help"], "", 0),
    "ease/help-of-train": (["train", "--help"], "", 0),
    "ease/refusal/unknown-option": (["train", "chat.toml", "--sett", "x=1"], CONFIG, 2),
    "ease/refusal/unknown-key": (["train", "chat.toml"], CONFIG + "[optim]\nmomentun = 0.9\n", 2),
    "ease/refusal/contradiction": (
        ["train", "chat.toml"],
        CONFIG + "[train]\naccumulate = 2\ntokens_per_step = 2\n",
        2,
    ),
    "ease/refusal/missing-data": (["train", "chat.toml"], CONFIG.replace("rows", "rowz"), 2),
    "ease/config-schema": (["config", "schema"], CONFIG, 0),
    "ease/config-show": (["config", "show", "chat.toml"], CONFIG.replace("org/model", "model"), 0),
    "ease/doctor": (["doctor"], CONFIG, 0),
}
TWICE = ("ease/config-show",)
"""The first call on a model finds out what later ones know: its time is a line of its own."""


def seconds(command: list[str], folder: str, status: int) -> tuple[float, float]:
    """Wall clock of one process, start to exit, and its time on the processors: what a busy machine does not stretch."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rft", *command], cwd=folder, env=env, capture_output=True, check=False
    )
    taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != status:
        raise SystemExit(f"{command}: exit status {done.returncode}, expected {status}\n{done.stderr.decode()}")
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_model(folder: Path) -> None:
    """A tiny Llama with a tokenizer, made by a process of its own: torch stays out of this one."""
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r}); from support.tiny import tiny_llama; "
        f"from support.data import write_tiny_tokenizer; tiny_llama({str(folder)!r}, vocab_size=400); write_tiny_tokenizer({str(folder)!r})"
    )
    subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True)


def main() -> None:
    """Every case in turn, `--repeats` times; the first of each, which warms the file cache, is not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    results = Results(args.results)
    for case, (command, text, status) in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "chat.toml").write_text(text, encoding="utf-8")
            Path(folder, "rows.jsonl").write_text("{}\n", encoding="utf-8")
            if case in TWICE:
                write_model(Path(folder, "model"))
            first = seconds(command, folder, status)
            times = [seconds(command, folder, status) for _ in range(args.repeats)]
        for name, figures in ((f"{case}/first", [first]), (case, times)):
            if name == case or case in TWICE:
                results.add(name, "rft", "seconds", [wall for wall, _ in figures])
                results.add(name, "rft", "cpu_seconds", [cpu for _, cpu in figures])


if __name__ == "__main__":
    main()
