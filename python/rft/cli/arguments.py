"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rft import log
from rft.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from rft.checkpoint.target import Target

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change one key; may be given often.", show_default=False),
]


def leave_stdout_to_json() -> None:
    """From here on our own lines go to stderr."""
    log.setup(verbosity=log.verbosity(), lines_to_stderr=True)


def find_run(run: str, *, hub: bool = True) -> Target:
    """RUN of `rft eval`, `rft chat` and `rft merge`. hub: a model on the hub will do; it is downloaded where it is not cached.

    Raises ConfigError for a RUN that is not on disk, nor on the hub.
    """
    from rft.checkpoint.target import find_target

    wanted = "a run directory (config.resolved.toml), an adapter folder (adapter_config.json)"
    if hub:
        wanted += ", a model folder (config.json), a .gguf file or a hub id (owner/name)"
    try:
        missing = not Path(run).expanduser().exists()
    except (RuntimeError, OSError):  # ~somebody, a name that is too long
        missing = True
    if not run:
        raise ConfigError("RUN", "is empty", wanted=wanted)
    is_path = run.count("/") != 1 or run.startswith((".", "/", "~")) or run.endswith((".gguf", "/"))
    if missing and (is_path or not hub):
        raise ConfigError(run, "no such file or directory", wanted=wanted)
    target = find_target(run)
    if missing:
        _fetch(target, run, wanted)
    return target


def _fetch(target: Target, run: str, wanted: str) -> None:
    """Have the hub model in the local cache. A mistyped path looks like a hub id: what is not on disk is said first."""
    from rft.models.source import find_model

    try:
        find_model(target.model)
    except ModelError as error:
        if not error.where.startswith("model.path"):  # it was fetched, and is not what it should be
            raise
        reason = error.problem.removeprefix("is no directory, ").removeprefix("and ")
        also = "" if reason.startswith("no such") else f"; taken for a hub id, it is {reason}"
        raise ConfigError(run, f"no such file or directory{also}", wanted=wanted) from None
