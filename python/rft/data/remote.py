"""Data that lies elsewhere: object stores and web servers through the extension, data sets of the hub through its client."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rft import log
from rft.errors import DataError, RftError
from rft.words import counted

if TYPE_CHECKING:
    from rft._native import NativeError
    from rft.data.sources import Caches

_HUB = "hf://datasets/"
_HUB_WANTED = (
    "hf://datasets/owner/name, with @revision and a pattern of files where need be: .../name@main/data/*.parquet"
)
_OTHER_SPLITS = re.compile(r"(?<![a-z])(test|testing|validation|valid|val|eval|dev)(?![a-z])")
_TRAIN = re.compile(r"(?<![a-z])(train|training)(?![a-z])")

Choose = Callable[[list[str], str, str], list[str]]
"""(names, where they lie, key of the config) -> those that are data files of one kind."""


def remote_files(path: str, where: str, choose: Choose) -> list[Path] | list[str]:
    """URLs of what a remote path names: one file, a glob, or a folder (ending in "/"); for the hub, files in its cache."""
    if path.startswith("hf://"):
        return _hub_files(path, where, choose)
    if path.startswith(("http://", "https://")):
        return [path]
    folder = path[: path.rindex("/", 0, _first_magic(path)) + 1] if glob.has_magic(path) else path
    if not folder.endswith("/"):
        return [path]
    from rft import _native

    try:
        names = [name for name, size in _native.list_remote(folder) if size]
    except _native.NativeError as error:
        raise told(error) from None
    if folder != path:
        pattern = _pattern(path)
        found = [name for name in names if pattern.fullmatch(name)]
        if not found:
            raise DataError(where, f"{path} matches none of the {counted(len(names), 'file')} below {folder}")
        return found
    return choose([name for name in names if "/." not in "/" + name.removeprefix(folder)], folder, where)


def fetch(urls: list[str], caches: Caches | None) -> dict[str, Path]:
    """The file with the content of each URL."""
    from rft import _native

    if caches is None:
        raise DataError(urls[0], "has to be fetched, and there is no folder to keep it in")
    try:
        files = _native.fetch_remote(urls, str(caches.folder / "downloads"), caches.limit, caches.progress)
    except _native.NativeError as error:
        raise told(error) from None
    return {url: Path(file) for url, file in zip(urls, files, strict=True)}


def told(error: NativeError) -> RftError:
    """What the extension says, as the error of its kind."""
    kind = DataError if error.kind == "data" else RftError
    return kind(error.where, error.problem, wanted=error.wanted, do=error.do)


def _first_magic(path: str) -> int:
    return min(at for at in (path.find(mark) for mark in "*?[") if at >= 0)


def _pattern(path: str) -> re.Pattern[str]:
    """As `glob` reads it: * and ? stay within a name, **/ stands for any folders."""
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", path)

    def of(part: str) -> str:
        if part.startswith("[") and part.endswith("]"):
            return "[^" + part[2:] if part.startswith("[!") else part
        return pieces.get(part) or re.escape(part)

    return re.compile("".join(map(of, parts)))


def _hub_files(path: str, where: str, choose: Choose) -> list[Path]:
    """Files of a data set in the hub client's cache: those of its train split, or of a pattern."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    match = re.fullmatch(re.escape(_HUB) + r"([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?", path)
    if match is None:
        raise DataError(where, f"{path} names no data set of the hub", wanted=_HUB_WANTED)
    repository, revision, pattern = match.group(1), match.group(2), match.group(3)
    try:
        info = HfApi().dataset_info(repository, revision=revision)
        commit, names, cached = str(info.sha), [file.rfilename for file in info.siblings or []], None
    except Exception as error:  # the hub client raises many kinds: each ends the run here
        cached = _cached_snapshot(repository, revision) if _out_of_reach(error) else None
        if cached is None:
            raise _hub_error(error, path, repository, where) from None
        commit, names = cached.name, sorted(f.relative_to(cached).as_posix() for f in cached.rglob("*") if f.is_file())
    if pattern:
        wanted = _pattern(pattern.rstrip("/") + "/**" if pattern.endswith("/") else pattern)
        chosen = sorted(name for name in names if wanted.fullmatch(name))
        if not chosen:
            raise DataError(where, f"{path} matches none of the {counted(len(names), 'file')} of the data set")
    else:
        chosen = _train_split(choose(sorted(n for n in names if not n.startswith(".")), path, where), path, where)
    if cached is not None:
        which = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        held = f"{counted(len(chosen), 'file')} of commit {commit[:7]}"
        log.warn(
            f"{path}: {which}; read from the local cache, which holds {held}",
            do="compare with the hub if that is not all",
        )
        return [cached / name for name in chosen]
    try:
        return [Path(hf_hub_download(repository, name, repo_type="dataset", revision=commit)) for name in chosen]
    except Exception as error:
        raise _hub_error(error, path, repository, where) from None


def _out_of_reach(error: Exception) -> bool:
    """Whether the hub was not asked, or gave no answer: a data set that it does not have is another matter."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    return isinstance(error, OSError) or "Connect" in type(error).__name__ or "Timeout" in type(error).__name__


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """The folder of the hub client's cache that holds what was fetched of this revision before."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", revision=revision, local_files_only=True))
    except (OSError, ValueError):  # nothing of it is there
        return None


def _train_split(names: list[str], path: str, where: str) -> list[str]:
    train = [name for name in names if _TRAIN.search(name.lower())]
    if not train and any(_OTHER_SPLITS.search(name.lower()) for name in names):
        raise DataError(
            where, f"{path} has no train split, but {', '.join(names[:4])}", do=f"say which files: {path}/{names[0]}"
        )
    chosen = train or names
    folders = sorted({os.path.dirname(name) for name in chosen})
    if len(folders) > 1:
        problem = f"{path} has several parts: {', '.join(folders)}"
        raise DataError(where, problem, do=f"say which: {path}/{folders[0]}/*{os.path.splitext(chosen[0])[1]}")
    return chosen


def _hub_error(error: Exception, path: str, repository: str, where: str) -> DataError:
    name = type(error).__name__
    if name in ("RepositoryNotFoundError", "GatedRepoError"):
        problem = f"{path}: the hub has no data set {repository!r}, or does not show it to you"
        return DataError(where, problem, do="check its name; `hf auth login` where it is private or gated")
    if name == "RevisionNotFoundError":
        return DataError(where, f"{path}: the data set has no such revision", wanted=_HUB_WANTED)
    first = str(error).strip().splitlines()[0] if str(error).strip() else name
    return DataError(
        where, f"{path}: the hub cannot be reached ({name}: {first})", do="download it and give the local path"
    )
