"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rft import log

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change one key; may be given often.", show_default=False),
]


def leave_stdout_to_json() -> None:
    """From here on our own lines go to stderr."""
    log.setup(verbosity=log.verbosity(), lines_to_stderr=True)
