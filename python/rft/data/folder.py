"""The folder of prepared sets: one folder a key, complete or absent, whichever process gets there first.

A set is written under a temporary name and renamed when it is whole. A file lock, which the system drops when its holder
dies, lets one process write; what a dead one left behind is removed by the next holder.
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
    """`data.store`: opens and writes prepared sets."""

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
            return _native.Store(str(path))
        except _native.NativeError:
            return None  # damaged, or of another format version: it is written again

    def make(self, key: str, write: Callable[[Path], Any], *, lead: bool) -> tuple[Store, bool]:
        """The set of this key, by `write(folder)` if need be; second value: whether it was there before.

        Not lead: wait for another process to write it, unless none does.
        """
        free_since = time.monotonic()
        while True:
            store = self.open(key)
            if store is not None:
                return store, True
            with self._lock(key) as held:
                alone = held and time.monotonic() - free_since > _LEAD_IS_GONE_SECONDS
                if held and (lead or alone):
                    return self._make_locked(key, write)
            if not held:
                free_since = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def _make_locked(self, key: str, write: Callable[[Path], Any]) -> tuple[Store, bool]:
        from rft import _native

        store = self.open(key)  # the last holder may have finished it
        if store is not None:
            return store, True
        for left in self.root.glob(f"{key}.tmp-*"):  # of a process that died: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        temporary, final = self.root / f"{key}.tmp-{os.getpid()}", self.root / key
        try:
            with self.explain():
                write(temporary)
                if final.exists():  # damaged, or it would have been opened
                    shutil.rmtree(final)
                os.rename(temporary, final)
                _sync_folder(self.root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with self.explain():
            return _native.Store(str(final)), False

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[bool]:
        """Whether this process got the lock. It stays an empty file: removing it would let two processes hold it."""
        with self.explain():
            handle = os.open(self.root / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:
            held = False
        try:
            yield held
        finally:
            os.close(handle)

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

    # ---- keys without reading the data again

    def known_key(self, spec: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
        """`compute()`, skipped where spec and the identity of every file equal those of an earlier call.

        Identity is device, inode, size, mtime_ns and ctime_ns; a ctime cannot be set back by hand.
        """
        stats = [os.stat(file) for file in files]
        identity = [[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in stats]
        digest = hashlib.sha256(json.dumps([spec, identity]).encode()).hexdigest()[:32]
        note = self.root / "known" / digest
        try:
            key = note.read_text("ascii").strip()
            if key:
                return key
        except (OSError, UnicodeDecodeError):
            pass
        newest = max((max(s.st_mtime_ns, s.st_ctime_ns) for s in stats), default=0)
        settled = newest < time.time_ns() - _RACY_NS
        key = compute()
        if settled:
            with self.explain():
                note.parent.mkdir(exist_ok=True)
                temporary = note.with_name(f"{note.name}.tmp-{os.getpid()}")
                temporary.write_text(key, "ascii")
                os.rename(temporary, note)
        return key


def shown_path(text: str) -> str:
    """A place that begins with a path, from the current folder where it lies below it: `chats/a.jsonl:412`."""
    return text.removeprefix(os.path.join(os.getcwd(), ""))


_ELSEWHERE = "free some space, or set data.store to a folder on another disk"


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
