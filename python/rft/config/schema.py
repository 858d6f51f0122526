"""The tables read as data: every key with its type in words, default and help; JSON Schema; the reference page. No torch."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rft.config.root import Config
from rft.config.table import MOST


@dataclass(frozen=True)
class Key:
    """One key of one table. name: "lr"; type: "a number above 0, or \"auto\""; default as TOML, "" where required."""

    name: str
    type: str
    default: str
    help: str
    required: bool


@dataclass(frozen=True)
class TableDoc:
    """A table: its heading in TOML, what it is, its keys. `variants`: "lora" where a union is told apart by name."""

    heading: str
    help: str
    keys: tuple[Key, ...]


def describe(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """What a key accepts, in words: "an integer above 0", "a number of at least 0 and below 1, or "auto""."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return describe(inner, [*metadata, *more])
    if origin in (Union, types.UnionType):
        return _describe_union(get_args(annotation), metadata)
    if origin is Literal:
        return join_or([quote(value) for value in get_args(annotation)])
    if origin is list:
        return f"a list of {_plural(get_args(annotation)[0])}"
    if origin is dict:
        return f"a table of {_plural(get_args(annotation)[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    noun = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}.get(
        annotation, str(annotation)
    )
    bounds = _bounds(metadata)
    return f"{noun} {bounds}" if bounds else noun


def _describe_union(members: tuple[Any, ...], metadata: tuple[Any, ...] | list[Any]) -> str:
    kept = [m for m in members if m is not type(None)]
    if len(kept) == 1:
        return describe(kept[0], metadata)
    if all(_is_table(m) for m in kept):
        return "a table"
    words: list[str] = []
    literals: list[str] = []
    lists: list[str] = []
    for member in kept:
        if get_origin(member) is Literal:
            literals += [quote(value) for value in get_args(member)]
        else:
            (lists if get_origin(member) is list else words).append(describe(member))
    return join_or(words + literals + lists)


def _is_table(annotation: Any) -> bool:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _plural(annotation: Any) -> str:
    text = describe(annotation)
    if get_origin(annotation) is Literal:
        return f"names ({text})"
    for one, many in (
        ("a string", "strings"),
        ("an integer", "integers"),
        ("a number", "numbers"),
        ("a table", "tables"),
    ):
        if text.startswith(one):
            return many + text[len(one) :]
    return text


def _bounds(metadata: tuple[Any, ...] | list[Any]) -> str:
    words = []
    for item in metadata:
        for bound in item.metadata if isinstance(item, FieldInfo) else [item]:
            match bound:
                case annotated_types.Gt(gt=value):
                    words.append(f"above {value:.12g}")
                case annotated_types.Ge(ge=value):
                    words.append(f"of at least {value:.12g}")
                case annotated_types.Lt(lt=value):
                    words.append(f"below {value:.12g}")
                case annotated_types.Le(le=value) if value != MOST:  # nobody gets there but by mistake
                    words.append(f"of at most {value:.12g}")
    return " and ".join(words)


def quote(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON's escapes are TOML's, but for DEL
    if isinstance(value, float):
        return re.sub(r"e([+-])0*(\d)", r"e\1\2", repr(value))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(quote(v) for v in value) + "]"
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{bare_key(k)} = {quote(v)}" for k, v in value.items()) + "}"
    return str(value)


def bare_key(key: str) -> str:
    """A key as TOML writes it: quoted where it has to be."""
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else quote(key)


def join_or(words: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


# ---- walking the tables


def models_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The table models in an annotation by their `name` default ("" where a table has no variants); {} for plain values."""
    if get_origin(annotation) in (Annotated, list):
        return models_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        found: dict[str, type[BaseModel]] = {}
        for member in get_args(annotation):
            found |= models_of(member)
        return found
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        name = annotation.model_fields.get("name")
        fixed = name is not None and get_origin(name.annotation) is Literal and isinstance(name.default, str)
        return {name.default if name is not None and fixed else "": annotation}
    return {}


def is_list(annotation: Any) -> bool:
    """Whether a key holds a list of tables."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_origin(annotation) is list


def field_at(path: tuple[str | int, ...], variants: dict[tuple[str | int, ...], str] | None = None) -> FieldInfo | None:
    """The field that a dotted path means, list indices in it; None if there is no such key.

    variants: the `name` that stands at a table's path, where the same key exists in several.
    """
    model: type[BaseModel] | None = Config
    field: FieldInfo | None = None
    for depth, part in enumerate(path):
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        field = model.model_fields[part]
        choices = models_of(field.annotation)
        here = (variants or {}).get(path[: depth + 1])
        model = choices.get(here) if here in choices else next((m for m in choices.values()), None)
        if len(choices) > 1 and here is None and depth + 1 < len(path):
            model = next((m for m in choices.values() if path[depth + 1] in m.model_fields), model)
    return field


def wanted_at(path: tuple[str | int, ...], variants: dict[tuple[str | int, ...], str] | None = None) -> str:
    """What the place accepts, in words; items of lists and tables with free names too. "" where nothing is known."""
    field = field_at(path, variants)
    annotation, metadata = (field.annotation, field.metadata) if field is not None else (None, [])
    if field is None and path and (parent := field_at(path[:-1], variants)) is not None:
        annotation = parent.annotation
    elif field is None or not isinstance(path[-1], int):
        return describe(annotation, metadata) if field is not None else ""
    lists = [a for a in (annotation, *get_args(annotation)) if get_origin(a) in (list, dict)]
    return describe(get_args(lists[0])[-1]) if lists else ""


def keys_at(path: tuple[str | int, ...], variant: str | None = None) -> list[str]:
    """Names of the keys of the table at a path; of all its variants where none is named; [] if it is no table."""
    models: dict[str, type[BaseModel]] = {"": Config}
    if path:
        field = field_at(path)
        models = models_of(field.annotation) if field is not None else {}
    if variant is not None and variant in models:
        return list(models[variant].model_fields)
    return list(dict.fromkeys(key for model in models.values() for key in model.model_fields))


def all_keys() -> Iterator[str]:
    """Every key as --set spells it, lists at item 0: "data.train.0.path"."""
    yield from _walk(Config, "")


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        choices = models_of(field.annotation)
        if not choices:
            yield path
        seen = set()
        for choice in choices.values():
            for key in _walk(choice, path + (".0." if is_list(field.annotation) else ".")):
                if key not in seen:
                    seen.add(key)
                    yield key


# ---- the pages made from it


def json_schema() -> dict[str, Any]:
    """JSON Schema of the TOML file, for editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rft config"}


def tables() -> list[TableDoc]:
    """Every table in the order of the file, each variant of a union by itself."""
    return [
        doc
        for name, field in Config.model_fields.items()
        for doc in _table_docs(name, field.annotation)
    ]  # fmt: skip


def _table_docs(path: str, annotation: Any) -> Iterator[TableDoc]:
    for variant, model in models_of(annotation).items():
        heading = f"[[{path}]]" if is_list(annotation) else f"[{path}]"
        if variant:
            heading += f' with name = "{variant}"'
        plain: list[tuple[str, FieldInfo]] = []
        nested: list[tuple[str, FieldInfo]] = []
        for name, field in model.model_fields.items():
            (nested if models_of(field.annotation) else plain).append((name, field))
        keys = tuple(_key(name, field) for name, field in plain)
        yield TableDoc(heading, (model.__doc__ or "").strip(), keys)
        for name, field in nested:
            yield from _table_docs(f"{path}.{name}", field.annotation)


def _key(name: str, field: FieldInfo) -> Key:
    default = field.get_default(call_default_factory=True)
    required = field.is_required()
    shown = "" if required or default is PydanticUndefined or default is None else quote(default)
    return Key(name, describe(field.annotation, field.metadata), shown, (field.description or "").strip(), required)
