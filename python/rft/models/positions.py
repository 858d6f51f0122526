"""How long a text the model was trained for, read from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft.config.model import ModelConfig
from rft.models.tokenizer import ModelFiles

_NAMES = ("max_position_embeddings", "n_positions", "seq_length")


def max_positions(model: ModelConfig) -> int | None:
    """Positions that the model's config names; None where it names no limit. Reads no weights."""
    if Path(model.path).is_file():
        from rft.models.tokenizer_gguf import read_metadata

        found = (value for key, value in read_metadata(model.path).items() if key.endswith(".context_length"))
        return next(found, None)
    files = ModelFiles(model)
    raw = files.json("config.json")
    value = _first(raw.get("text_config") or {}) or _first(raw)
    if value is None and raw:  # left out of the file: what the architecture's own config says
        from rft.models.source import read_config

        value = _first(vars(read_config(files.directory, model).get_text_config()))
    return value


def _first(values: dict[str, Any]) -> int | None:
    return next((values[name] for name in _NAMES if isinstance(values.get(name), int)), None)
