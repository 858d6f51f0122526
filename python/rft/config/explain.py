"""pydantic's findings in the user's words: where, what was given, what is wanted, what to do. Secrets are never repeated."""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rft.config import schema
from rft.config.compatibility import FOREIGN_KEYS, FOREIGN_TABLES, REFUSED_VALUES
from rft.errors import ConfigError
from rft.log import mask

Loc = tuple[str | int, ...]
HIDDEN = '"***"'

# Values that are secrets whatever key they stand under: hub, W&B, OpenAI-type and cloud access keys.
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{12,})|://[^/\s:@]+:[^/\s@]+@"
)
_SECRET_SOURCES = (  # what an option's name holds -> where the library behind it looks
    ("wandb", "WANDB_API_KEY"),
    ("mlflow", "MLFLOW_TRACKING_TOKEN"),
    ("hub", "HF_TOKEN"),
    ("hf", "HF_TOKEN"),
    ("hugging", "HF_TOKEN"),
    ("trackio", "HF_TOKEN"),
    ("aws", "AWS_SECRET_ACCESS_KEY"),
    ("token", "HF_TOKEN"),
)


def dotted(loc: Loc) -> str:
    """data.train.0.path"""
    return ".".join(str(part) for part in loc)


def show_value(value: Any, key: str = "") -> str:
    """A value as TOML writes it, cut to one short line; *** where it may be a secret."""
    last = key.rsplit(".", 1)[-1]
    if isinstance(value, str) and (
        _SECRET_VALUE.search(value) or mask(value) != value or (last and is_secret_like(last))
    ):
        return HIDDEN
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list) and (len(value) > 4 or any(isinstance(v, dict | list) for v in value)):
        return f"a list of {len(value)}"
    text = schema.quote(value)
    if _SECRET_VALUE.search(text):
        return HIDDEN
    return text if len(text) <= 60 else text[:56] + '..."'


def find_secrets(raw: dict[str, Any], source: str) -> dict[Loc, ConfigError]:
    """An error for each secret in the tables: by the name of an unknown key, the look of a value, or the environment's own."""
    found: dict[Loc, ConfigError] = {}
    for loc, value in _leaves(raw, ()):
        named = _free_key_name(loc)
        looks = isinstance(value, str) and (_SECRET_VALUE.search(value) is not None or mask(value) != value)
        if not looks and not (named is not None and isinstance(value, str) and is_secret_like(named)):
            continue
        variable = next((v for word, v in _SECRET_SOURCES if word in dotted(loc).lower()), None)
        where = f"the environment variable {variable}" if variable else "an environment variable"
        found[loc] = ConfigError(
            place(source, dotted(loc)),
            "secrets do not belong in a config: it is saved with the run",
            wanted=f"{where}, which the library that needs it reads by itself",
            do=f"take it out{f', export {variable}' if variable else ''}, and make a new secret if this one was ever shared",
        )
    return found


def is_secret_like(name: str) -> bool:
    """Whether an unknown key is meant for a secret rather than a slip of the pen in one of ours (token_per_step)."""
    own = {key.rsplit(".", 1)[-1] for key in schema.all_keys()}
    if name in own or difflib.get_close_matches(name, own, n=1, cutoff=0.8):
        return False
    return bool(re.search(r"token|key|secret|passw|credential|\bauth", name, re.IGNORECASE))


def _free_key_name(loc: Loc) -> str | None:
    """The first name in a path that is no key of ours; None where all are, or where names are free (fields, roles)."""
    for depth, part in enumerate(loc):
        if isinstance(part, str):
            field = schema.field_at(loc[: depth + 1])
            if field is None:
                return str(loc[-1]) if isinstance(loc[-1], str) else part
            if schema.describe(field.annotation).startswith("a table of"):
                return None
    return None


def _leaves(node: Any, loc: Loc) -> Any:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, (*loc, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, (*loc, index))
    else:
        yield loc, node


def place(source: str, key: str) -> str:
    """`chat.toml: optim.lr`, `--set optim.lr`; just the key for dicts, which have no file."""
    if source == "--set":
        return f"--set {key}"
    return ": ".join(part for part in (source, key) if part)


# ---- validation errors


def explain(error: ValidationError, raw: dict[str, Any], source: str, sets: dict[str, str]) -> dict[Loc, ConfigError]:
    """A ConfigError for each place in the file, in its order.

    sets: text of each --set by its dotted key, to show how it has to be quoted.
    """
    findings: dict[Loc, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        findings.setdefault(_real_loc(item["loc"], item["type"], raw), []).append(dict(item))
    return {loc: _explain_one(loc, items, raw, source, sets) for loc, items in findings.items()}


def together(errors: Sequence[ConfigError]) -> ConfigError:
    """The first of several errors; the others hang on it as `others`."""
    first, *others = errors
    first.others = tuple(others)
    return first


def _real_loc(loc: Loc, kind: str, raw: Any) -> Loc:
    """pydantic's place without the tags of unions, which are no part of the file."""
    real: list[str | int] = []
    node = raw
    for index, part in enumerate(loc):
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_list or (isinstance(node, dict) and part in node):
            node = node[part]
            real.append(part)
        elif kind == "missing" and index == len(loc) - 1:
            real.append(part)
    return tuple(real)


def _value_at(loc: Loc, raw: Any) -> Any:
    for part in loc:
        raw = raw[part]
    return raw


def _explain_one(loc: Loc, items: list[dict[str, Any]], raw: Any, source: str, sets: dict[str, str]) -> ConfigError:
    kind = items[0]["type"]
    if kind == "missing":
        return _missing(loc, source)
    if any(dotted(loc) == key or dotted(loc).startswith(key + ".") for key in sets):
        source = "--set"
    if kind == "extra_forbidden":
        return _unknown(loc, raw, source)
    value = _value_at(loc, raw)
    if kind == "union_tag_invalid":
        loc, value = (*loc, "name"), value.get("name")
        field = schema.field_at(loc[:-1])
        wanted = schema.join_or([schema.quote(name) for name in schema.models_of(field.annotation if field else None)])
    else:
        wanted = schema.wanted_at(loc, _variants(raw)) or items[0]["msg"]
    where = place(source, dotted(loc))
    for refused in REFUSED_VALUES:
        if dotted(loc) in refused.keys and any(value == v and type(value) is type(v) for v in refused.values):
            return ConfigError(f"{where} = {show_value(value)}", refused.reason, do=refused.do)
    if value == "":
        required = schema.field_at(loc)
        leave = "" if required is None or required.is_required() else ", or take the key out"
        return ConfigError(where, "is empty", wanted=wanted, do=f"give it a value{leave}")
    if kind == "value_error":
        problem = f"{show_value(value, dotted(loc))} is {items[0]['ctx']['error']}"
        return ConfigError(where, problem, do="keep one of them" if "more than once" in problem else "")
    if kind == "too_short" and not value:
        return ConfigError(where, "is empty", wanted=f"at least one [[{dotted(loc)}]] table with a path")
    return ConfigError(where, _given(loc, value, wanted), wanted=wanted, do=_how_to_write(loc, value, wanted, sets))


def _given(loc: Loc, value: Any, wanted: str) -> str:
    """What stands there and in which way it is not what is wanted: its type, its range, or its spelling."""
    shown = show_value(value, dotted(loc))
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown} is not a finite number"
    if isinstance(value, bool):
        return f"{shown} is a truth value"
    if isinstance(value, int | float):
        if "a number" in wanted or ("an integer" in wanted and isinstance(value, int)):
            return f"{shown} is out of range"
        return f"{shown} is {'an integer' if isinstance(value, int) else 'a decimal number'}"
    if isinstance(value, str):
        allowed = re.findall(r'"([^"]+)"', wanted)
        close = difflib.get_close_matches(value, allowed, n=1) if shown != HIDDEN else []
        if "a list of" in wanted and (wanted.startswith("a list of tables") or close == [value]):
            return f"{shown} is a string, not a list"
        if close:
            return f"{shown} is not known; did you mean {schema.quote(close[0])}?"
        return f"{shown} is {'not known' if wanted.startswith(chr(34)) else 'a string'}"
    return f"is {'an empty list' if value == [] else shown}"


def _how_to_write(loc: Loc, value: Any, wanted: str, sets: dict[str, str]) -> str:
    key = dotted(loc)
    name = str(loc[-1])
    if isinstance(value, str) and (list_key := _table_list(loc, wanted)):
        if any(key == given for given in sets):
            return f"--set {list_key}.0.path={value}"
        return f"write the table [[{list_key}]] with path = {show_value(value, key)}"
    if isinstance(value, str) and "a list of" in wanted:
        as_list = f"[{show_value(value, key)}]"
        return f"--set '{key}={as_list}'" if key in sets else f"write {name} = {as_list}"
    if wanted.startswith("a list of tables") and isinstance(value, dict):
        return f"write [[{key}]] with two brackets on each side: it is a list"
    if isinstance(value, dict) and not wanted.startswith("a table"):
        return f"write {name} = ... instead of a table [{key}]"
    if key in sets and '"' not in sets[key] and not isinstance(value, str) and "a string" in wanted:
        return f"quote it for the shell and for TOML: --set '{key}=\"{sets[key]}\"'"
    if isinstance(value, str) and ("number" in wanted or "integer" in wanted or "true or false" in wanted):
        bare = value.strip()
        if re.fullmatch(r"[+-]?(\d[\d_]*)(\.\d+)?([eE][+-]?\d+)?|true|false", bare):
            return f"write {name} = {bare}, without quotes"
    if isinstance(value, float) and value.is_integer() and "integer" in wanted and "number" not in wanted:
        return f"write {name} = {int(value)}"
    if wanted == "a table" and not isinstance(value, dict):
        field = schema.field_at(loc)
        named = field is not None and "" not in schema.models_of(field.annotation)
        return (
            f"write {name} = {{name = {schema.quote(value)}}}"
            if named and isinstance(value, str)
            else f"write a table [{key}]"
        )
    return ""


def _table_list(loc: Loc, wanted: str) -> str:
    """The dotted key of the list of tables that a place means, whole or one item of it; "" for anything else."""
    whole = loc[:-1] if isinstance(loc[-1], int) else loc
    field = schema.field_at(whole)
    if field is None or not wanted.startswith(("a list of tables", "a table")):
        return ""
    return dotted(whole) if schema.is_list(field.annotation) else ""


def _variants(raw: Any) -> dict[Loc, str]:
    found: dict[Loc, str] = {}
    for loc, value in _leaves(raw, ()):
        if loc and loc[-1] == "name" and isinstance(value, str):
            found[loc[:-1]] = value
    return found


def _missing(loc: Loc, source: str) -> ConfigError:
    key = dotted(loc)
    lines = {
        "model": ('[model]\npath = "organisation/model-or-folder"', "the table [model] is missing"),
        "model.path": ('path = "organisation/model-or-folder"', "is missing"),
        "data": ('[[data.train]]\npath = "rows.jsonl"', "no data: the table [[data.train]] is missing"),
        "data.train": ('[[data.train]]\npath = "rows.jsonl"', "no data: the table [[data.train]] is missing"),
    }
    text, problem = lines.get(key, (f"{loc[-1]} = ...", "is missing"))
    field = schema.field_at(loc)
    wanted = schema.describe(field.annotation, field.metadata) if field is not None and key not in lines else ""
    help_text = (field.description or "") if field is not None and key.endswith("path") else ""
    return ConfigError(
        place(source, key), problem, wanted=wanted or help_text, do="add " + text.replace("\n", " with ")
    )


def _unknown(loc: Loc, raw: Any, source: str) -> ConfigError:
    table, name = loc[:-1], str(loc[-1])
    shown = f"unknown key {name!r}" if table else f"unknown table or key {name!r}"
    field = schema.field_at(table) if table else None
    variant = _variants(raw).get(table) or getattr(field.default if field is not None else None, "name", None)
    own = schema.keys_at(table, variant)
    where = place(source, dotted(table))
    everywhere = list(schema.all_keys())
    if close := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
        return ConfigError(where, f"{shown}; did you mean {close[0]!r}?")
    if table and name in schema.keys_at(table):  # a key of another variant of the same union
        choices = schema.models_of(field.annotation)  # type: ignore[union-attr]
        variant = variant or next(iter(choices))
        named = schema.join_or([schema.quote(v) for v, model in choices.items() if name in model.model_fields])
        return ConfigError(where, f"{name!r} is no key of name = {schema.quote(variant)}, but of {named}",
                           do=f"leave out {name}, or set name = {named}")  # fmt: skip
    value = _value_at(loc, raw)
    fp16 = REFUSED_VALUES[0]
    if name.lower() in ("fp16", "half") or (FOREIGN_KEYS.get(name) == "train.precision" and value in fp16.values[:-1]):
        return ConfigError(where, f"{shown}: {fp16.reason}", do=fp16.do)
    if isinstance(value, dict | list) and name.lower() in FOREIGN_TABLES:
        return ConfigError(where, f"{shown}; here it is [{FOREIGN_TABLES[name.lower()]}]")
    if name.lower() in FOREIGN_KEYS:
        return ConfigError(where, f"{shown}; here it is {_spell(FOREIGN_KEYS[name.lower()])}")
    same = [key for key in everywhere if key.rsplit(".", 1)[-1] == name]
    if same:
        return ConfigError(where, f"{shown}; it belongs to {schema.join_or([_spell(key) for key in same[:3]])}")
    if close := difflib.get_close_matches(name, {key.rsplit(".", 1)[-1] for key in everywhere}, n=1, cutoff=0.8):
        target = next(key for key in everywhere if key.rsplit(".", 1)[-1] == close[0])
        return ConfigError(where, f"{shown}; did you mean {_spell(target)}?")
    return ConfigError(
        where, shown, wanted=", ".join(own) if own else "", do="see docs/config.md or `rft config schema`"
    )


def _spell(key: str) -> str:
    """`lr in [optim]`"""
    table, _, name = key.rpartition(".")
    if table.endswith(".0"):
        return f"{name} in [[{table[:-2]}]]"
    if key in ("data.train", "data.eval"):
        return f"[[{key}]]"
    return f"{name} in [{table}]"


def unknown_set_key(key: str, problem: str, do: str = "") -> ConfigError:
    """A --set whose left side is no key."""
    return ConfigError(f"--set {key}", problem, wanted="table.key=value, as in optim.lr=1e-4", do=do)


def nearest_path(path: Path) -> str:
    """What is there under a similar name: each part of the path may be misspelt. "" where nothing is."""
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if os.path.lexists(found / part):
            found = found / part
            continue
        try:
            names = [entry.name for entry in sorted(found.iterdir())[:2000] if entry.exists()]
        except OSError:
            return ""
        close = difflib.get_close_matches(part, names, n=1, cutoff=0.7)
        if not close:
            return ""
        found = found / close[0]
    return str(found) if found != path and found.exists() else ""


def what_is_there(path: str | Path) -> str:
    """What stands at a path that is of no use: "is a pipe", "is a link to x, which does not exist"; "" where nothing does."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            if not os.path.exists(path):
                return f"is a link to {os.readlink(path)}, which does not exist"
            mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"),
             (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"))  # fmt: skip
    return next((f"is {kind}" for test, kind in kinds if test(mode)), "is a file")
