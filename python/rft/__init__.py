"""rft fine-tunes open-weight language models: `rft.train(config)` and `rft.data.open(store)`. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rft.config.root import Config
    from rft.training.result import Result

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def train(config: str | Path | dict[str, Any] | Config, *, rows: Iterable[dict[str, Any]] | None = None) -> Result:
    """Train as `rft train` does, in this process, and return what came of it.

    config: path of a TOML file, a dict of the same tables, or a `Config`.
    rows: an iterable of rows that stands in for the path of the only `[[data.train]]`.
    Raises `rft.errors.RftError` where the command would print an error block.
    """
    from rft.report import write_report
    from rft.training.api import train as run

    return run(config, rows=rows, report=write_report)
