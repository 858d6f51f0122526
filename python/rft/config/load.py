"""TOML and --set in, `Config` out, strictly. Paths are absolute from here on; rules over several tables are checked; no torch."""

from __future__ import annotations

import glob
import os
import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rft.config import schema
from rft.config.compatibility import RULES, Rule
from rft.config.data import REMOTE
from rft.config.explain import (
    explain,
    find_secrets,
    nearest_path,
    place,
    show_value,
    together,
    unknown_set_key,
    what_is_there,
)
from rft.config.root import Config
from rft.errors import ConfigError

ROWS_PATH = "<rows>"
"""Stands for the path of the only [[data.train]] where rows come from Python (`rft.train(config, rows=...)`)."""
MAX_DEPTH = 32
"""Levels of tables and lists; the config itself has 4."""


def load_config(
    config: str | Path | dict[str, Any] | Config,
    sets: Sequence[str] = (),
    *,
    rows: bool = False,
    check_files: bool = True,
) -> Config:
    """Read a TOML file (or take a dict or a Config), apply --set texts ("optim.lr=1e-4"), validate.

    Relative paths count from the TOML's folder, those in `sets` and in dicts from the current one; all are absolute in the
    result, and `train.out` is filled in. rows: the rows come from Python, so the one training path may be left out.
    check_files: missing data files and models are errors here. Raises ConfigError.
    """
    if isinstance(config, Config):
        source, folder, raw = "", Path.cwd(), config.model_dump(exclude_unset=True)
        name = "run"
    elif isinstance(config, dict):
        _check_depth(config, "config")
        source, folder, raw = "", Path.cwd(), _copy(config)
        name = "run"
    else:
        path = Path(config).expanduser()
        source, folder, raw = path.name, path.absolute().parent, read_toml(path)
        name = path.stem
    set_texts = apply_sets(raw, sets)
    from_sets = set(set_texts)
    if rows:
        _stand_in_for_rows(raw)
    made = _validate(raw, source, set_texts)
    _check_rules(made, source, RULES)
    made = _absolute_paths(made, source, folder, from_sets, default_out=folder / "runs" / name)
    _check_rules(made, source, RULES)  # again: whether model.path is on this disk is known now
    if check_files:
        _check_files(made, source)
    return made


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError with the line where it is no TOML."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = nearest_path(path.absolute())
        do = (
            f"did you mean {os.path.relpath(near)}?"
            if near
            else "give the path of a TOML file, as in `rft train chat.toml`"
        )
        link = what_is_there(path)
        raise ConfigError(str(path), link or "no such file", do="" if link else do) from None
    except IsADirectoryError:
        do = "give the TOML file"
        if (path / "config.resolved.toml").is_file():
            do = f"this is a run directory: give the TOML file it was made from, or {path / 'config.resolved.toml'}"
        raise ConfigError(str(path), "is a directory", wanted="a TOML file", do=do) from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"is not UTF-8 (byte {error.start})", wanted="a TOML file in UTF-8") from None
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from None
    except RecursionError:
        raise _too_deep(path.name) from None
    _check_depth(tables, path.name)
    return tables


def _check_depth(tables: dict[str, Any], where: str) -> None:
    """Tables in tables without end are refused before anything walks them."""
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list | tuple)
        ]
        if not level:
            return
    raise _too_deep(where)


def _too_deep(where: str) -> ConfigError:
    return ConfigError(where, "tables or lists are nested too deeply", wanted=f"at most {MAX_DEPTH} levels")


def _syntax_error(path: Path, text: str, message: str) -> ConfigError:
    """File, line, what the parser says, and the usual cause. The line itself may hold a secret, so it is not repeated."""
    found = re.search(r"\(at line (\d+), column (\d+)\)", message)
    problem = re.sub(r"\s*\(at .*\)$", "", message)
    lines = text.splitlines()
    number = int(found[1]) if found else max(1, len(lines))
    line = lines[number - 1] if number <= len(lines) else ""
    do = "fix the line"
    key = re.match(r"\s*([A-Za-z0-9_.-]+)\s*=", line)
    if problem.startswith(("Invalid value", "Expected newline")) and key:
        do = f'text needs quotes: {key[1]} = "..."; true, false and numbers do not'
    elif problem.startswith(("Illegal character", "Unterminated", "Expected '\"'")) and line.count('"') % 2:
        do = "close the quotes"
    elif "=" not in line and ":" in line:
        do = "TOML writes key = value, with an equals sign"
    elif problem.startswith("Cannot overwrite") or "twice" in problem:
        do = "the key or table stands in the file twice: keep one"
    column = f", column {found[2]}" if found else ""
    return ConfigError(f"{path.name}:{number}", f"not valid TOML{column}: {problem}", do=do)


# ---- --set


def apply_sets(raw: dict[str, Any], sets: Sequence[str]) -> dict[str, str]:
    """Change `raw` by each "table.key=value"; returns the values' texts by dotted key. Raises ConfigError."""
    texts: dict[str, str] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise unknown_set_key(key or text, "there is no value" if key else "there is no key")
        parts = _split_key(key)
        if len(parts) > MAX_DEPTH:
            raise _too_deep(f"--set {parts[0]}...")
        _put(raw, parts, parse_value(value, key), key)
        texts[".".join(parts)] = value.strip()
    return texts


def parse_value(text: str, key: str = "") -> Any:
    """A TOML value; a bare word is a string. Raises ConfigError for quotes or brackets that do not close."""
    text = text.strip()
    if "\n" not in text:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            if text[:1] in ('"', "'", "[", "{"):
                problem = f"{show_value(text, key)} is no TOML value"
                do = 'check quotes and brackets; the shell takes one pair of quotes away: --set \'key=["a", "b"]\''
                raise ConfigError(f"--set {key}", problem, do=do) from None
        except RecursionError:
            raise _too_deep(f"--set {key}") from None
        else:
            _check_depth({"value": value}, f"--set {key}")
            if isinstance(value, str | bool | int | float | list | dict):
                return value  # dates and times are words to us: no key takes one
    return text


def _split_key(key: str) -> list[str]:
    """Parts of a dotted key; TOML's quotes allow dots inside a part (data.train.0.roles."my.bot")."""
    try:
        node = tomllib.loads(f"{key} = 0")
    except (tomllib.TOMLDecodeError, RecursionError):
        raise unknown_set_key(key, "is no key of a table") from None
    parts: list[str] = []
    while isinstance(node, dict):
        (part, node), *more = node.items()
        if more:
            raise unknown_set_key(key, "is more than one key")
        parts.append(part)
    return parts


def _put(raw: dict[str, Any], parts: list[str], value: Any, key: str) -> None:
    node: Any = raw
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) > len(node):
                name = ".".join(parts[:depth])
                have = f"has {len(node)} items, 0 to {len(node) - 1}" if node else "has no items"
                raise unknown_set_key(key, f"{name} {have}", do=f"write {name}.0 for its first item")
            if int(part) == len(node):
                node.append({})
            index: Any = int(part)
        elif isinstance(node, dict):
            index = part
        else:
            raise unknown_set_key(key, f"{'.'.join(parts[:depth])} is no table")
        if last:
            node[index] = value
            return
        if isinstance(node, dict) and index not in node:
            node[index] = [] if parts[depth + 1].isdigit() and _is_list(parts[: depth + 1]) else {}
        node = node[index]


def _is_list(parts: list[str]) -> bool:
    field = schema.field_at(tuple(parts))
    return field is not None and schema.is_list(field.annotation)


# ---- validation


def _copy(value: Any) -> Any:
    """Dicts and lists anew, tables as dicts, paths as text: the caller's dict stays as it is."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True)
    return value


def _stand_in_for_rows(raw: dict[str, Any]) -> None:
    data = raw.setdefault("data", {})
    if isinstance(data, dict):
        train = data.setdefault("train", [{}])
        if isinstance(train, list) and len(train) > 1:
            raise ConfigError(
                "data.train", f"{len(train)} data sets, and rows= stands in for one", do="keep one of them"
            )
        if isinstance(train, list) and train and isinstance(train[0], dict):
            train[0].setdefault("path", ROWS_PATH)


def _validate(raw: dict[str, Any], source: str, sets: dict[str, str]) -> Config:
    """The config. Raises one ConfigError with everything that is wrong in its tables, secrets first."""
    secrets = find_secrets(raw, source)
    found: dict[Any, ConfigError] = {}
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        found = explain(error, raw, source, sets)
    errors = [*secrets.values(), *(error for loc, error in found.items() if not _covered(loc, secrets))]
    if errors:
        raise together(errors) from None
    return config


def _covered(loc: tuple[Any, ...], secrets: Collection[tuple[Any, ...]]) -> bool:
    """Whether the place, or all that is in it, has been told as a secret."""
    return any(secret[: len(loc)] == loc for secret in secrets)


def _check_rules(config: Config, source: str, rules: Sequence[Rule]) -> None:
    broken = [
        ConfigError(place(source, " and ".join(_given_keys(config, rule))), rule.message, do=rule.do)
        for rule in rules
        if rule.when(config)
    ]
    if broken:
        raise together(broken)


def _given_keys(config: Config, rule: Rule) -> list[str]:
    """The rule's keys that the user wrote; the first in any case."""
    given = [key for key in rule.keys if _was_set(config, key)]
    return given or [rule.keys[0]]


def _was_set(config: Config, key: str) -> bool:
    node: Any = config
    for part in key.split("."):
        if part not in getattr(node, "model_fields_set", ()):
            return False
        node = getattr(node, part)
    return True


# ---- paths


def _absolute_paths(config: Config, source: str, folder: Path, from_sets: set[str], *, default_out: Path) -> Config:
    """Every path key absolute. A model or adapter that is no folder or file here stays as it is: a hub id.

    Raises ConfigError for a spelling that no file can have.
    """

    def base(key: str) -> Path:
        return Path.cwd() if key in from_sets or any(key.startswith(s + ".") for s in from_sets) else folder

    def absolute(key: str, value: str) -> str:
        where = place("--set" if key in from_sets else source, key)
        try:
            path = os.path.normpath(base(key) / Path(value).expanduser())
            path.encode()
        except RuntimeError:
            raise ConfigError(
                where, f"{value.split('/')[0]} is no user's home here", do="write the whole path"
            ) from None
        except UnicodeEncodeError:
            told = f"{os.fsencode(path)!r} is not UTF-8"
            raise ConfigError(
                where, told, do="rename the file or folder: its name is written into JSON and TOML"
            ) from None
        if "\0" in path:
            raise ConfigError(
                where, f"{schema.quote(value)} holds a NUL character, which no path can", do="take it out"
            )
        return path

    def local_or_hub(key: str, value: str) -> str:
        path = absolute(key, value)
        return path if os.path.exists(path) or _is_plainly_local(value) else value

    data, train, model = config.data, config.train, config.model
    sources = {
        part: [
            item.model_copy(
                update={
                    "path": _source_path(f"data.{part}.{i}.path", item.path, absolute),
                    **({"rows": _rows_path(f"data.{part}.{i}.rows", item.rows, absolute)} if item.rows else {}),
                }
            )
            for i, item in enumerate(getattr(data, part))
        ]
        for part in ("train", "eval")
    }
    data = data.model_copy(
        update={
            "train": sources["train"],
            **({"eval": sources["eval"]} if data.eval else {}),
            **({"store": absolute("data.store", data.store)} if data.store else {}),
            **({"template": absolute("data.template", data.template)} if _is_template_file(data.template) else {}),
        }
    )
    update: dict[str, Any] = {
        "data": data,
        "model": model.model_copy(update={"path": local_or_hub("model.path", model.path)}),
        "train": train.model_copy(update={"out": absolute("train.out", train.out or str(default_out))}),
    }
    adapter_path = getattr(config.adapter, "path", None)
    if adapter_path:
        adapter = config.adapter.model_copy(update={"path": local_or_hub("adapter.path", adapter_path)})
        update["adapter"] = adapter
    if config.memory.offload_dir:
        offload_dir = absolute("memory.offload_dir", config.memory.offload_dir)
        update["memory"] = config.memory.model_copy(update={"offload_dir": offload_dir})
    return config.model_copy(update=update)


def _source_path(key: str, value: str, absolute: Any) -> str:
    return value if value == ROWS_PATH or "://" in value else absolute(key, value)


def _rows_path(key: str, value: str, absolute: Any) -> str:
    file, colon, function = value.rpartition(":")
    return absolute(key, file) + colon + function if file.endswith(".py") else value


def _is_template_file(template: str) -> bool:
    return template.endswith((".jinja", ".jinja2", ".j2")) or "/" in template


def _is_plainly_local(path: str) -> bool:
    """Whether a spelling can only mean this disk: a hub id is `name` or `organisation/name`."""
    return path.startswith((".", "/", "~")) or path.endswith((".gguf", "/")) or path.count("/") > 1


def _check_files(config: Config, source: str) -> None:
    """Missing inputs are told before anything is loaded."""
    for part in ("train", "eval"):
        for index, item in enumerate(getattr(config.data, part)):
            _check_source(item.path, place(source, f"data.{part}.{index}.path"))
    template, model = config.data.template, config.model.path
    if _is_template_file(template) and not os.path.isfile(template):
        raise _unusable(place(source, "data.template"), template, wanted="a .jinja file")
    if (_is_plainly_local(model) and not os.path.exists(model)) or _is_special(model):
        wanted = "a folder with config.json and .safetensors files, a .gguf file, or a hub id (organisation/name)"
        raise _unusable(place(source, "model.path"), model, wanted=wanted)
    adapter = getattr(config.adapter, "path", None)
    if adapter and _is_plainly_local(adapter) and not os.path.isfile(os.path.join(adapter, "adapter_config.json")):
        problem = f"{_shown(adapter)} holds no adapter_config.json"
        do = "give an adapter's folder, as runs/NAME/final"
        raise ConfigError(place(source, "adapter.path"), problem, do=do)


def _check_source(path: str, where: str) -> None:
    if path == ROWS_PATH:
        return
    if "://" in path:
        if path.partition("://")[0] not in REMOTE:
            wanted = "a path on this disk, or " + ", ".join(f"{scheme}://" for scheme in REMOTE)
            raise ConfigError(where, f"{show_value(path)} is a URL of a kind that is not read", wanted=wanted)
        return
    if glob.has_magic(path) and not os.path.exists(path):
        if not glob.glob(path, recursive=True):
            raise ConfigError(
                where, f"nothing matches {_shown(path)}", do="check the pattern and the folder it counts from"
            )
    elif not os.path.exists(path) or _is_special(path):
        parent, name = os.path.split(path)
        hub = not os.path.isdir(parent) and not os.path.splitext(name)[1]
        do = f"for a data set of the hub write hf://datasets/{os.path.basename(parent)}/{name}" if hub else ""
        wanted = "a file, a glob or a directory of files, which are read more than once"
        raise _unusable(where, path, wanted=wanted, do=do)


def _is_special(path: str) -> bool:
    """A pipe, a socket or a device: there, and no input."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _unusable(where: str, path: str, *, wanted: str, do: str = "") -> ConfigError:
    """Nothing is there, or something else than what is wanted."""
    if there := what_is_there(path):
        return ConfigError(where, f"{_shown(path)} {there}", wanted=wanted)
    near = nearest_path(Path(path))
    do = f"did you mean {_shown(near)}?" if near else do or "check the spelling"
    parent = os.path.dirname(path)
    if do == "check the spelling" and not os.path.isdir(parent):
        do = f"its folder {_shown(parent)} does not exist either; relative paths count from the TOML's folder"
    return ConfigError(where, f"{_shown(path)} does not exist", wanted=wanted, do=do)


def _shown(path: str) -> str:
    """A path as short as it can be: relative where that stays below the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
