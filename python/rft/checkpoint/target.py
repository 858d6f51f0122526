"""What `rft eval`, `rft chat` and `rft merge` are pointed at: a run directory, or an adapter or model folder."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from rft.checkpoint import MARK
from rft.config.model import ModelConfig
from rft.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """Where weights and settings are. Nothing was loaded."""

    kind: Literal["run", "adapter", "model"]
    path: Path
    """What the user named."""
    model: ModelConfig
    """The whole model, or the base of `adapter`."""
    adapter: Path | None
    """Folder in PEFT's format."""
    config: dict[str, Any]
    """The resolved config of the run; empty for a folder outside a run."""

    @property
    def home(self) -> Path | None:
        """The folder that holds the tokenizer and template which were trained with, where there is one."""
        folder = self.adapter or Path(self.model.path)
        return folder if (folder / "tokenizer.json").is_file() else None

    @property
    def name(self) -> str:
        """For messages: the model's name, and the adapter on it; a run of all weights has its own."""
        if self.kind == "run" and self.adapter is None:
            return self.path.name
        model = Path(self.model.path).name
        return f"{model} + {self.path.name}" if self.adapter else model


def find_target(path: str) -> Target:
    """Tell apart run directories, adapter folders and models (a folder, a GGUF file, a hub id).

    Raises ConfigError for a path that holds none of them, and for a run that has no `final/` yet.
    """
    folder = Path(path).expanduser()
    if (folder / MARK).is_file():
        run = folder.absolute().parent.parent
        raise ConfigError(
            path,
            "is a checkpoint: it holds what training goes on from, and neither a whole adapter nor a model",
            wanted="the run, whose final/ has the weights",
            do=f"give {_shown(run)}; or, where its training has not ended, start the same `rft train` again",
        )
    if (folder / "config.resolved.toml").is_file():
        return _of_run(folder)
    if (folder / "adapter_config.json").is_file():
        return _of_adapter(folder, {})
    if (folder / "config.json").is_file() or folder.suffix == ".gguf" or _is_hub_id(path):
        return Target("model", folder, ModelConfig(path=path), None, {})
    runs = _runs_in(folder)
    if runs:
        raise ConfigError(
            path,
            f"is no run, but holds {len(runs)}" if len(runs) > 1 else "is no run, but holds one",
            wanted="one run",
            do=f"give {' or '.join(_shown(run) for run in runs[:3])}",
        )
    if folder.name == "checkpoints" and (folder.parent / "config.resolved.toml").is_file():
        raise ConfigError(path, "holds the checkpoints of a run", wanted="the run", do=f"give {_shown(folder.parent)}")
    raise ConfigError(
        path,
        "holds neither a run nor a model" if folder.exists() else "no such file or directory",
        wanted="a run directory (config.resolved.toml), an adapter (adapter_config.json) or a model (config.json, *.gguf)",
    )


def _runs_in(folder: Path) -> list[Path]:
    """Run directories in a folder, the newest first."""
    try:
        found = [path for path in folder.iterdir() if (path / "config.resolved.toml").is_file()]
    except OSError:
        return []
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def _shown(path: Path) -> str:
    """As short as it can be."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _is_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def _of_run(run: Path) -> Target:
    config = _read_config(run / "config.resolved.toml")
    if not isinstance(config.get("model", {}), dict):
        raise ConfigError(str(run / "config.resolved.toml"), "its model is no table: it was changed after rft wrote it")
    final = run / "final"
    if not final.is_dir():
        raise ConfigError(
            str(run),
            "has no final/ yet: the run is not finished",
            do="start the same `rft train` again: it goes on from its last checkpoint",
        )
    if (final / "adapter_config.json").is_file():
        return _of_adapter(final, config, run)
    return Target("run", run, ModelConfig(path=str(final)), None, config)


def _of_adapter(folder: Path, config: dict[str, Any], run: Path | None = None) -> Target:
    """The run's own config knows the base best: a GGUF file, a revision; else the adapter names it."""
    path = folder / "adapter_config.json"
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not JSON: {error}", do="save the adapter again") from None
    if not isinstance(named, dict) or not isinstance(named.get("base_model_name_or_path") or "", str):
        raise ConfigError(str(path), "is not what PEFT writes", wanted="a JSON object", do="save the adapter again")
    base = config.get("model") or {
        "path": named.get("base_model_name_or_path") or "",
        "add_tokens": _added_tokens(folder, named.get("trainable_token_indices")),
    }
    if not base["path"]:
        raise ConfigError(
            str(folder), "does not name its base model", do="set base_model_name_or_path in adapter_config.json"
        )
    try:
        model = ModelConfig(**base)
    except (ValidationError, TypeError) as error:
        raise ConfigError(
            str((run or folder) / "config.resolved.toml"), f"its [model] is not what rft wrote: {error}"
        ) from None
    return Target("run" if run else "adapter", run or folder, model, folder, config)


def _added_tokens(folder: Path, trained: Any) -> list[str]:
    """Text of the tokens whose embedding rows the adapter holds, from the tokenizer beside it."""
    file = folder / "tokenizer.json"
    if not trained or not file.is_file():
        return []
    ids = set(next(iter(trained.values())) if isinstance(trained, dict) else trained)
    listed = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
    return [token["content"] for token in listed if token["id"] in ids]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from None
