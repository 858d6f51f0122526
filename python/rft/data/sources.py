"""From the paths of the config to the files that are read: globs, directories, archives, and rows that come from Python."""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.config.data import SourceConfig
from rft.config.explain import what_is_there
from rft.data.code import code_rows
from rft.data.remote import fetch, remote_files, remote_states, told
from rft.errors import DataError

_PACKED = ("", ".gz", ".zst")
TEXT_ENDINGS = tuple(".txt" + packed for packed in _PACKED)
KINDS = {
    "JSON": tuple(kind + packed for kind in (".jsonl", ".json", ".ndjson") for packed in _PACKED),
    "CSV": tuple(kind + packed for kind in (".csv", ".tsv") for packed in _PACKED),
    "Parquet": (".parquet",),
    "Arrow": tuple(kind + packed for kind in (".arrow", ".feather") for packed in _PACKED),
    "archive": (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst"),
}
"""Endings of what holds rows. A folder may hold one kind, so that nothing is read twice or left out unseen."""
_WANTED = (
    "JSON lines (.jsonl, .json), CSV, Parquet, Arrow or text (.txt), plain, .gz or .zst, or a .zip or .tar of these"
)
_OF_DATASETS = ("dataset_info.json", "dataset_infos.json", "state.json")
"""What `datasets` and the hub put beside data."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a data set."""

    path: Path
    config: SourceConfig
    number: int = 0
    """Of the data set in the config."""
    name: str = ""
    """How messages call it, where not by its path."""
    member: str | None = None
    """A file inside the archive that `path` is."""
    remote: dict[str, Any] | None = None
    """Where it is fetched from when a stream reaches it: url, bytes, etag, cache, limit."""

    def spec(self) -> dict[str, Any]:
        """As the native extension takes it."""
        return {
            "path": str(self.path),
            "member": self.member,
            "remote": self.remote,
            "name": self.name or None,
            "format": self.config.format,
            "fields": dict(self.config.fields),
            "roles": dict(self.config.roles),
            "set": self.number,
            "weight": self.config.weight,
            "max_rows": self.config.max_rows,
        }


@dataclass(frozen=True)
class Caches:
    """Where what does not lie on this disk as it is read is kept."""

    folder: Path
    limit: int = 100_000_000_000
    """Bytes that fetched files may take."""
    code: bool = False
    """Whether functions of the user may make rows (`data.allow_code`)."""
    progress: Callable[[int, int], None] | None = None
    """Bytes fetched, bytes to fetch."""


def expand(
    sources: Iterable[SourceConfig], table: str, caches: Caches | None = None, *, lazy: bool = False
) -> list[SourceFile]:
    """Every file of every source, in the order of the config and then of their names.

    table: "data.train" or "data.eval", for messages. caches: None refuses rows from code and paths that have to be fetched.
    lazy: what lies elsewhere is not fetched here, but when it is read.
    Raises DataError for a path that gives no file, for what a function of the user does, and for what cannot be fetched.
    """
    found = []
    for number, source in enumerate(sources):
        key = f"{table}.{number}"
        if source.rows and os.path.isdir(source.path):
            do = f"give the files: {os.path.join(source.path, '*')}"
            raise DataError(f"{key}.path", f"{source.path} is a folder, and rows takes files", do=do)
        found.append((number, source, key, _files(source.path, f"{key}.path")))
    # All at once, so that the files of one set never make room for each other.
    urls = [str(file) for *_, files in found for file in files if isinstance(file, str)]
    fetched = fetch(urls, caches) if urls and not lazy else {}
    states = remote_states(urls, caches) if urls and lazy else {}
    result = []
    for number, source, key, files in found:
        for file in files:
            if isinstance(file, str) and lazy:
                result.append(_remote(source, number, file, f"{key}.path", states[file]))
                continue
            path, name = (fetched[file], file) if isinstance(file, str) else (file, "")
            if source.rows:
                result.append(_of_code(source, number, path, name, key, caches))
            elif path.name.lower().endswith(KINDS["archive"]):
                members = _members(path, f"{key}.path")
                result += [SourceFile(path, source, number, f"{name or path}/{member}", member) for member in members]
            else:
                result.append(SourceFile(path, source, number, name))
    return result


def _remote(source: SourceConfig, number: int, url: str, where: str, state: dict[str, Any]) -> SourceFile:
    path = Path(url.split("?")[0].split("#")[0])
    if path.name.lower().endswith(KINDS["archive"]):
        do = "give the files themselves, download the archive, or leave out data.streaming"
        raise DataError(where, f"{url} is an archive, of which streaming cannot know the members", do=do)
    return SourceFile(path, source, number, url, remote=state)


def _of_code(source: SourceConfig, number: int, path: Path, name: str, key: str, caches: Caches | None) -> SourceFile:
    if caches is None or not caches.code:
        raise DataError(f"{key}.rows", "runs code, which is off", do="set data.allow_code = true if you trust it")
    rows = source.rows
    assert rows is not None
    made = code_rows(rows, path, caches.folder / "rows", f"{key}.rows", write_rows)
    return SourceFile(made, source, number, f"{rows}({name or path.name})")


def _files(path: str, where: str) -> list[Path] | list[str]:
    """Paths on this disk, or URLs."""
    if "://" in path:
        return remote_files(path, where, _of_one_kind)
    plain = Path(path)
    if plain.is_dir():
        return _of_directory(plain, where)
    if plain.is_file():
        return [plain.resolve()]
    if glob.has_magic(path):
        found = sorted(Path(name).resolve() for name in glob.glob(path, recursive=True) if os.path.isfile(name))
        if not found:
            raise DataError(where, f"{path} matches no file", wanted=_WANTED)
        return found
    if there := what_is_there(plain):
        raise DataError(where, f"{path} {there}", wanted=_WANTED)
    raise DataError(where, f"{path} does not exist", do=_did_you_mean(plain))


def _of_directory(directory: Path, where: str) -> list[Path]:
    """Files in a directory and below it; text files only where there are no rows (they are often READMEs)."""
    if (directory / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in directory.iterdir() if part.is_dir())
        problem = f"{directory} holds several splits: {', '.join(splits)}"
        raise DataError(where, problem, do=f"name one: {directory / splits[0] if splits else directory}")
    found = sorted(
        file.resolve()
        for file in directory.rglob("*")
        if file.is_file() and not _hidden(file.relative_to(directory).parts)
    )
    return [Path(name) for name in _of_one_kind([str(file) for file in found], str(directory), where)]


def _members(archive: Path, where: str) -> list[str]:
    """The data files of an archive, by the rules of a folder. Its names are checked, nothing is unpacked."""
    from rft import _native

    try:
        members = sorted(name for name, _size in _native.archive_members(str(archive)))
    except _native.NativeError as error:
        raise told(error) from None
    seen = [name for name in members if not _hidden(Path(name).parts)]
    nested = [name for name in seen if name.lower().endswith(KINDS["archive"])]
    if nested:
        raise DataError(where, f"{archive}: member {nested[0]!r} is an archive itself", do="unpack the outer one")
    return _of_one_kind(seen, str(archive), where)


def _hidden(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _of_one_kind(names: list[str], place: str, where: str) -> list[str]:
    names = [name for name in names if os.path.basename(name) not in _OF_DATASETS]
    arrow = [name for name in names if name.lower().endswith(KINDS["Arrow"])]
    if arrow:
        # Results of `Dataset.map` beside the set itself.
        made = [name for name in arrow if os.path.basename(name).startswith("cache-")]
        names = [name for name in names if name not in made] if len(made) < len(arrow) else names
    found = {
        kind: chosen
        for kind, endings in KINDS.items()
        if (chosen := [name for name in names if name.lower().endswith(endings)])
    }
    if len(found) > 1:
        kinds = " and ".join(f"{kind} ({os.path.basename(chosen[0])})" for kind, chosen in found.items())
        ending = os.path.splitext(next(iter(found.values()))[0])[1]
        raise DataError(where, f"{place} holds files of several kinds: {kinds}", do=f"say which: {place}/**/*{ending}")
    for chosen in found.values():
        return chosen
    texts = [name for name in names if name.lower().endswith(TEXT_ENDINGS)]
    if not texts:
        raise DataError(where, f"{place} holds no data files", wanted=_WANTED)
    return texts


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
