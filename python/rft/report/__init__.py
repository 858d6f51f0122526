"""A run directory as one self-contained page: `write_report(run_dir)` writes report.html."""

from __future__ import annotations

import contextlib
from pathlib import Path


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run directory from what lies there, and return its path.

    Works on an unfinished run too. Files that are missing leave their section out and say so.
    Raises ConfigError where the directory holds no run, OSError where it cannot be written: an older report stays.
    """
    from rft.report.page import render
    from rft.report.read import read_run

    run = read_run(Path(run_dir))
    path = run.path / "report.html"
    # a viewer that reloads in the middle of the write sees the old page, never half of one
    partial = path.with_suffix(".html.partial")
    text = render(run)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return path
