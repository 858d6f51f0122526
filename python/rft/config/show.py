"""A config as TOML that `load_config` takes back: every default written out, the reason of each `auto` behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from rft.config.root import Config
from rft.config.schema import bare_key, quote

_FROM_THE_ADAPTER = ("r", "alpha", "targets", "rslora", "dora", "init", "bias", "modules_to_save")


def to_toml(config: Config, reasons: Mapping[str, str] | None = None) -> str:
    """Every key of every table. reasons: "optim.lr" -> why it has this value, written as a comment behind it.

    Keys without a value are left out, as TOML has no null; so is what a loaded adapter fixes by itself.
    """
    reasons = reasons or {}
    lines: list[str] = []
    for name in type(config).model_fields:
        lines += _table(name, name, getattr(config, name), reasons)
    return "\n".join(lines).strip() + "\n"


def _table(path: str, heading: str, table: BaseModel, reasons: Mapping[str, str]) -> Iterator[str]:
    """path: as --set spells it (data.train.0). heading: as TOML does (data.train)."""
    plain: list[tuple[str, Any]] = []
    nested: list[tuple[str, Any]] = []
    for name in sorted(
        type(table).model_fields, key=lambda name: name != "name"
    ):  # what tells variants apart stands first
        value = getattr(table, name)
        if value is None or (getattr(table, "path", None) and path == "adapter" and name in _FROM_THE_ADAPTER):
            continue
        is_table = isinstance(value, BaseModel) or (
            isinstance(value, list) and value and isinstance(value[0], BaseModel)
        )
        (nested if is_table or (isinstance(value, dict) and value) else plain).append((name, value))
    plain = [(name, value) for name, value in plain if value != {}]
    if plain or not nested or path in reasons or path != heading:
        yield ""
        yield (f"[[{heading}]]" if path.rpartition(".")[2].isdigit() else f"[{heading}]") + _comment(reasons.get(path))
    for name, value in plain:
        yield f"{name} = {quote(value)}{_comment(reasons.get(f'{path}.{name}'))}"
    for name, value in nested:
        inner, inner_heading = f"{path}.{name}", f"{heading}.{name}"
        if isinstance(value, BaseModel):
            yield from _table(inner, inner_heading, value, reasons)
        elif isinstance(value, dict):
            yield from ("", f"[{inner_heading}]", *(f"{bare_key(k)} = {quote(v)}" for k, v in value.items()))
        else:
            for index, item in enumerate(value):
                yield from _table(f"{inner}.{index}", inner_heading, item, reasons)


def _comment(reason: str | None) -> str:
    return "  # " + " ".join(reason.split()) if reason else ""
