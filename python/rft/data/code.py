"""Rows that a function of the user makes of a file: `rows = "module:function"`, once for each state of code and file.

The function gets a path and gives dicts. What it gave lies as JSON lines beside the prepared sets, under a name made of the
module's source, the function's name and the file's content; helpers that the module imports are not part of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rft.errors import DataError

_WANTED = '"module:function" or "file.py:function"'


def code_rows(
    reference: str, path: Path, folder: Path, where: str, write: Callable[[Iterable[Any], Path], int]
) -> Path:
    """The file of rows that `reference` makes of `path`, from `folder` if it is there already.

    write(rows, file) -> count. where: key of the config, for messages. Several processes may ask at once; one runs the code.
    Raises DataError: no such module or function, an exception in it (with its line), rows that are no JSON objects, no rows.
    """
    source, module, function = _find(reference, where)
    digest = hashlib.sha256()
    for part in (source.read_bytes(), function.encode(), _content(path)):
        digest.update(len(part).to_bytes(8, "little") + part)
    made = folder / f"{digest.hexdigest()[:32]}.jsonl"
    if made.is_file():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(made.with_suffix(".lock")):
        if made.is_file():
            return made
        for left in folder.glob(f"{made.stem}.tmp-*"):  # of a process that died: we hold the lock
            left.unlink()
        temporary = made.with_name(f"{made.stem}.tmp-{os.getpid()}")
        try:
            call = getattr(_load(source, module, where), function, None)
            if not callable(call):
                raise DataError(where, f"{source} has no function {function!r}", wanted=_WANTED)
            if write(_told(call, path, f"{reference}({path.name!r})", source), temporary) == 0:
                raise DataError(where, f"{reference} made no rows of {path}")
            os.replace(temporary, made)
        finally:
            temporary.unlink(missing_ok=True)
    return made


def _find(reference: str, where: str) -> tuple[Path, str, str]:
    """File and name of the module, and name of the function. The module is not run yet; packages above it are."""
    module, colon, function = reference.rpartition(":")
    if not colon or not module or not function.isidentifier():
        raise DataError(where, f"{reference!r} names no function", wanted=_WANTED)
    if module.endswith(".py"):
        if not os.path.isfile(module):
            raise DataError(where, f"{module} does not exist", wanted=_WANTED)
        name = f"rft_rows_{hashlib.sha256(str(Path(module).absolute()).encode()).hexdigest()[:16]}"
        return Path(module), name, function
    with _current_folder_first():
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            spec = None
        except (Exception, SystemExit) as error:  # of a package above it
            raise DataError(where, f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        problem = f"there is no module {module!r} in Python's path or in the current folder"
        raise DataError(where, problem, wanted=_WANTED)
    return Path(spec.origin), module, function


def _load(source: Path, name: str, where: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and relative imports look their own module up
    with _current_folder_first():
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise DataError(where, f"{source} cannot be imported: {_told_error(error, source)}") from error
    return module


def _told(call: Callable[[str], Iterable[Any]], path: Path, shown: str, source: Path) -> Iterator[Any]:
    try:
        yield from call(str(path))
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(shown, _told_error(error, source), do="mend the function, or the file it reads") from error


def _told_error(error: BaseException, source: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(source)]
    place = f" ({source.name}:{lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{place}"


def _content(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """The lock falls when its holder dies; its file stays, or two processes could hold it."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
