"""The folder of prepared sets: one folder a key, complete or absent, whichever process gets there first.

The extension takes a file lock beside the set, writes under another name, and renames it when it is whole; what a killed
process left is taken over by the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.errors import DataError, ModelError, RftError, unusable_folder

if TYPE_CHECKING:
    from rft._native import NativeError, Store

FORMAT_VERSION = 2
"""Of the prepared sets and of what is handed to the extension; part of every key."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POLL_SECONDS = 0.05
_LEAD_IS_GONE_SECONDS = 10.0
"""How long nobody may hold the lock before a process that waits for the lead prepares the set itself."""
_RACY_NS = 2_000_000_000
"""A file changed this shortly before it was read may change again without a new time stamp (coarse clocks)."""


def default_root() -> Path:
    """`$XDG_CACHE_HOME/rft/sets`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "rft" / "sets"


class SetFolder:
    """`data.store`: opens and writes prepared sets. Raises ConfigError where the path is no folder."""

    def __init__(self, root: str | Path):
        self.root = Path(root).expanduser().absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable_folder("data.store", self.root, error) from None

    def open(self, key: str) -> Store | None:
        """The set of this key if it is there and whole."""
        from rft import _native

        path = self.root / key
        if not path.is_dir():
            return None
        try:
            store = _native.Store(str(path))
        except _native.NativeError:
            return None  # damaged, or of another format version: it is written again
        return store if store.key == key else None  # moved here by hand

    def make(self, key: str, write: Callable[[Path], dict[str, Any]], *, lead: bool) -> tuple[Store, dict[str, Any]]:
        """The set of this key, by `write(folder)` if need be, and what that gave; {"written": False} where it was there.

        Not lead: wait for another process to write it, unless none does.
        """
        free_since = time.monotonic()
        while True:
            store = self.open(key)
            if store is not None:
                with contextlib.suppress(OSError):  # when it was last used, for `rft data prune`
                    os.utime(self.root / key)
                return store, {"written": False}
            if lead or time.monotonic() - free_since > _LEAD_IS_GONE_SECONDS:
                from rft import _native

                with self.explain():
                    made = write(self.root / key)
                    return _native.Store(str(self.root / key)), made
            if self._is_locked(key):
                free_since = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _is_locked(self, key: str) -> bool:
        """Whether a process writes this set."""
        try:
            handle = os.open(self.root / f"{key}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def older_formats(self) -> list[str]:
        """Names of sets in a format that this rft does not read."""
        names = []
        for manifest in self.root.glob("*/manifest.json"):
            try:
                version = json.loads(manifest.read_bytes()).get("format_version")
            except (OSError, ValueError, AttributeError):
                continue
            if version != FORMAT_VERSION:
                names.append(manifest.parent.name)
        return names

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Failures of the disk and of the extension as errors that say what to do."""
        from rft import _native

        try:
            yield
        except _native.NativeError as error:
            raise self._of_native(error) from None
        except OSError as error:
            if error.errno in _FULL:
                raise self.full(str(error.strerror)) from None
            raise RftError(
                str(error.filename or self.root), f"cannot be written: {error.strerror}", do=_ELSEWHERE
            ) from None

    def _of_native(self, error: NativeError) -> RftError:
        if error.kind == "full":
            return self.full(error.problem)
        kinds = {"data": DataError, "template": DataError, "tokenizer": ModelError}
        where, do = shown_path(error.where), error.do
        if error.kind == "io" and error.where.startswith(str(self.root)):
            do = do or _ELSEWHERE  # a limit on file sizes, a quota, a disk that fails
        return kinds.get(error.kind, RftError)(where, error.problem, wanted=error.wanted, do=do)

    def full(self, problem: str) -> RftError:
        """The error for a disk that holds no more."""
        try:
            free = f"{shutil.disk_usage(self.root).free / 1e9:.2f} GB free there"
        except OSError:
            free = "free space unknown"
        return RftError(str(self.root), f"no space left for the prepared set ({problem}; {free})", do=_ELSEWHERE)

    # ---- what need not be found out again

    def known(self, kind: str, subject: Any, compute: Callable[[], str], *, keep: bool = True) -> str:
        """`compute()`, skipped where an earlier call for the same subject (JSON) left its answer.

        The note holds what it is about and a hash of itself: one that was moved, changed or cut is not believed but
        replaced. keep: whether the answer may be noted.
        """
        told = json.dumps(subject, sort_keys=True)
        note = self.root / "known" / f"{kind}-{_digest(told)}"
        try:
            found = json.loads(note.read_bytes())
            if found["subject"] == told and found["sha256"] == _digest(told, found["answer"]):
                return str(found["answer"])
        except (OSError, ValueError, TypeError, KeyError):
            pass
        answer = compute()
        if keep:
            text = json.dumps({"subject": told, "answer": answer, "sha256": _digest(told, answer)})
            with self.explain():
                note.parent.mkdir(exist_ok=True)
                temporary = note.with_name(f"{note.name}.tmp-{os.getpid()}")
                temporary.write_text(text, "utf-8")
                os.rename(temporary, note)
        return answer

    def known_hashes(self, sources: Sequence[dict[str, Any]], compute: Callable[[dict[str, Any]], str]) -> list[str]:
        """`compute(source)` for each source (as the extension takes it), without reading files that are as they were.

        A file is as it was where device, inode, size, mtime_ns and ctime_ns are; a ctime cannot be set back by hand.
        """
        return [self._known_hash(source, compute) for source in sources]

    def _known_hash(self, source: dict[str, Any], compute: Callable[[dict[str, Any]], str]) -> str:
        try:
            stat = os.stat(source["path"])
        except OSError:
            return compute(source)  # which says what is wrong with it
        identity = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        settled = max(stat.st_mtime_ns, stat.st_ctime_ns) < time.time_ns() - _RACY_NS
        # Of some kinds of file only what the row needs is hashed.
        choice = {
            name: value for name, value in source.items() if name not in ("name", "roles", "set", "weight", "max_rows")
        }
        return self.known("file", [FORMAT_VERSION, choice, identity], lambda: compute(source), keep=settled)


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


def shown_path(text: str) -> str:
    """A place that begins with a path, from the current folder where it lies below it: `chats/a.jsonl:412`."""
    return text.removeprefix(os.path.join(os.getcwd(), ""))


_ELSEWHERE = "free some space, or set data.store to a folder on another disk"
