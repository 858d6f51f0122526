"""`rft config show cfg.toml` and `rft config schema`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rft import log
from rft.cli.arguments import ConfigPath, Sets, leave_stdout_to_json
from rft.config.load import load_config


def show(
    config: ConfigPath,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print every key with its value, and behind each `auto` that was decided what for.

    The output is TOML and can be trained from. The model's config is read, its weights and the data are not.
    """
    if as_json:
        leave_stdout_to_json()
    checked = load_config(config, sets or [])
    from rft.launch import visible_gpus
    from rft.training.preview import resolve_without_weights

    resolved, decisions = resolve_without_weights(checked, processes=max(1, visible_gpus()))
    if as_json:
        reasons = [{"key": d.key, "value": d.value, "reason": d.reason} for d in decisions]
        table = {"config": resolved.model_dump(mode="json"), "decisions": reasons}
        log.output(json.dumps(table, indent=2, ensure_ascii=False) + "\n")
        return
    from rft.config.show import to_toml

    log.output(to_toml(resolved, {d.key: d.reason for d in decisions}))


def schema() -> None:
    """Print the JSON Schema of the TOML file, for completion and checks in an editor."""
    from rft.config.schema import json_schema

    log.output(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")


commands = {
    "show": (show, "The resolved config, with the reason for each auto"),
    "schema": (schema, "JSON Schema of the TOML file, for editors"),
}
