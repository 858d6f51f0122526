"""From the paths of the config to the files that are read: globs, directories, and rows that come from Python."""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.config.data import SourceConfig
from rft.config.explain import what_is_there
from rft.errors import DataError

_PACKED = ("", ".gz", ".zst")
JSON_ENDINGS = tuple(kind + packed for kind in (".jsonl", ".json", ".ndjson") for packed in _PACKED)
TEXT_ENDINGS = tuple(".txt" + packed for packed in _PACKED)
_WANTED = "JSON lines (.jsonl, .json) or text (.txt), plain, .gz or .zst"
_LATER = (".parquet", ".arrow", ".csv", ".tsv", ".zip", ".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class SourceFile:
    """One file of a data set."""

    path: Path
    config: SourceConfig
    number: int = 0
    """Of the data set in the config."""
    name: str = ""
    """How messages call it, where not by its path."""

    def spec(self) -> dict[str, Any]:
        """As the native extension takes it."""
        return {
            "path": str(self.path),
            "name": self.name or None,
            "format": self.config.format,
            "fields": dict(self.config.fields),
            "roles": dict(self.config.roles),
            "set": self.number,
            "weight": self.config.weight,
            "max_rows": self.config.max_rows,
        }


def expand(sources: Iterable[SourceConfig], table: str) -> list[SourceFile]:
    """Every file of every source, in the order of the config and then of their names.

    table: "data.train" or "data.eval", for messages. Raises DataError for a path that gives no file.
    """
    files = []
    for number, source in enumerate(sources):
        where = f"{table}.{number}.path"
        files += [SourceFile(path, source, number) for path in _files(source.path, where)]
    return files


def _files(path: str, where: str) -> list[Path]:
    if "://" in path:
        raise DataError(where, f"{path}: remote data is not supported", do="download it and give the local path")
    plain = Path(path)
    if plain.is_dir():
        return _of_directory(plain, where)
    if plain.is_file():
        return [_known(plain.resolve(), where)]
    if glob.has_magic(path):
        found = sorted(Path(name).resolve() for name in glob.glob(path, recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(where, f"{path} matches no file", wanted=_WANTED)
        return [_known(file, where) for file in found]
    if there := what_is_there(plain):
        raise DataError(where, f"{path} {there}", wanted=_WANTED)
    raise DataError(where, f"{path} does not exist", do=_did_you_mean(plain))


def _of_directory(directory: Path, where: str) -> list[Path]:
    """Files in a directory and below it; text files only where there are no JSON files (they are often READMEs)."""
    found = sorted(
        file.resolve()
        for file in directory.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    )
    for endings in (JSON_ENDINGS, TEXT_ENDINGS):
        chosen = [file for file in found if file.name.lower().endswith(endings)]
        if chosen:
            return chosen
    raise DataError(where, f"{directory} holds no data files", wanted=_WANTED)


def _known(file: Path, where: str) -> Path:
    name = file.name.lower()
    if name.endswith(_LATER):
        raise DataError(where, f"{file}: this kind of file is not read", wanted=_WANTED, do="convert it to JSON lines")
    return file


def _did_you_mean(path: Path) -> str:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return f"check data paths: {path.parent} does not exist either"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write rows from Python as JSON lines; returns how many. Raises DataError for a row that is no JSON object."""
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for count, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise DataError(f"rows:{count}", f"a {type(row).__name__}", wanted="a dict a row")
            try:
                stream.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DataError(f"rows:{count}", f"not JSON: {error}") from None
    return count
