"""What a run directory holds, read into plain values. Torn last lines and missing files are no errors."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft.errors import ConfigError
from rft.training.metrics import is_metrics_line


@dataclass(frozen=True)
class RunRecord:
    """One run directory. Dicts are empty and lists are empty where the file is not there."""

    path: Path
    config: dict[str, Any]
    config_text: str
    receipts: dict[str, Any]
    data: dict[str, Any]
    verify: dict[str, Any]
    plan: dict[str, Any]
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    others: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Files that are there and could not be read, with the reason."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        return (self.path / "final").is_dir()

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of one key of the train lines, where it is a finite number."""
        steps, values = [], []
        for line in self.train:
            value = line.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
                steps.append(line["step"])
                values.append(value)
        return steps, values


def read_run(path: Path) -> RunRecord:
    """Read a run directory. Raises ConfigError where there is neither a resolved config nor a metrics file."""
    if not (path / "config.resolved.toml").is_file() and not (path / "metrics.jsonl").is_file():
        raise ConfigError(
            str(path),
            "holds no run" if path.is_dir() else "is no directory",
            wanted="a run directory, as `rft train` writes it (config.resolved.toml, metrics.jsonl, ...)",
        )
    unreadable: list[str] = []
    config_text = _text(path / "config.resolved.toml")
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        config = {}
        unreadable.append(f"config.resolved.toml: {error}")
    train, evals, others = _metrics(path / "metrics.jsonl", unreadable)
    return RunRecord(
        path=path,
        config=config,
        config_text=config_text,
        receipts=_json(path / "receipts.json", unreadable),
        data=_json(path / "data.json", unreadable),
        verify=_json(path / "verify.json", unreadable),
        plan=_json(path / "plan.json", unreadable),
        train=train,
        evals=evals,
        others=others,
        unreadable=unreadable,
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _json(path: Path, unreadable: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        unreadable.append(f"{path.name}: {error}")
        return {}
    return value if isinstance(value, dict) else {"value": value}


def _metrics(path: Path, unreadable: list[str]) -> tuple[list[dict], list[dict], list[dict]]:
    """Train and eval lines in the order of their steps.

    A killed run may have logged steps that its resume then ran again: of two lines for one step the later counts.
    """
    train: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            # the last line of a run that was killed while it wrote is expected to be torn
            if number < len(lines):
                unreadable.append(f"metrics.jsonl:{number}: not JSON")
            continue
        if not is_metrics_line(entry):
            unreadable.append(f"metrics.jsonl:{number}: not a line that rft writes")
        elif entry["kind"] in ("train", "eval"):
            (train if entry["kind"] == "train" else evals)[entry["step"]] = entry
        else:
            others.append(entry)
    return [train[s] for s in sorted(train)], [evals[s] for s in sorted(evals)], others
