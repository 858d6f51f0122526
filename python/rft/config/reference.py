"""docs/config.md, made from the tables: `python -m rft.config.reference docs/config.md`. A test holds the file against it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rft.config import schema
from rft.config.compatibility import FOREIGN_KEYS, REFUSED_VALUES, RULES

_HEAD = """\
# Config reference

Made from the tables in `python/rft/config` by `make docs`; do not edit.

The shortest config names a model and data; everything else has a default.

```toml
[model]
path = "HuggingFaceTB/SmolLM2-135M-Instruct"

[[data.train]]
path = "rows.jsonl"
```

- **Strict.** An unknown key, a wrong type and a combination that does not go together are errors before anything is loaded,
  with the nearest key and what to write. `"2e-5"` is no number and `4096.0` no integer; an integer is taken where a number is wanted.
- **Paths** count from the TOML file's folder, those in `--set` from the current one. A folder or file on this disk beats a hub id of the same spelling.
- **`--set table.key=value`** changes one key: the value is TOML, a bare word is a string, list items are numbered
  (`--set optim.lr=1e-4 --set data.train.0.path=other.jsonl --set 'log.tags=["a", "b"]'`).
- **Secrets** are read from the environment by the libraries that need them (`HF_TOKEN`, `WANDB_API_KEY`); a secret in a config is refused and never shown.
- `rft config show my.toml` prints every key with its value and the reason for each `auto`; `rft config schema` prints the JSON Schema
  (in VS Code's Even Better TOML: `#:schema ./rft.schema.json` in the first line).
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([_HEAD, *_tables(), *_rules()]).rstrip() + "\n"


def _tables() -> Iterator[str]:
    for table in schema.tables():
        heading, _, variant = table.heading.partition(" with ")
        yield f"## `{heading}`{f' with `{variant}`' if variant else ''}\n"
        yield table.help + "\n"
        if not table.keys:
            continue
        yield "| key | what it takes | default | |"
        yield "|---|---|---|---|"
        for key in table.keys:
            default = "**required**" if key.required else (f"`{key.default}`" if key.default else "")
            yield f"| `{key.name}` | {_cell(key.type)} | {default} | {_cell(key.help)} |"
        yield ""


def _rules() -> Iterator[str]:
    yield "## What does not go together\n"
    yield "| keys | why | do |"
    yield "|---|---|---|"
    for rule in RULES:
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        yield f"| {keys} | {_cell(rule.message)} | {_cell(rule.do)} |"
    yield "\n## Values that are refused, with the reason\n"
    yield "| keys | values | why | do |"
    yield "|---|---|---|---|"
    for refused in REFUSED_VALUES:
        keys = ", ".join(f"`{key}`" for key in refused.keys)
        values = ", ".join(f"`{schema.quote(value)}`" for value in refused.values)
        yield f"| {keys} | {values} | {_cell(refused.reason)} | {_cell(refused.do)} |"
    yield "\n## Words of other programs\n"
    yield "These are no keys here; the error for one names ours.\n"
    yield "| there | here |"
    yield "|---|---|"
    by_key: dict[str, list[str]] = {}
    for there, here in FOREIGN_KEYS.items():
        by_key.setdefault(here, []).append(f"`{there}`")
    for here, there_names in by_key.items():
        yield f"| {', '.join(there_names)} | `{here}` |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
