"""Data that is prepared while it is trained on (docs/streaming.md): a producer in the extension makes windows of it, and every
rank of the machine reads them out of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft import log
from rft.data.folder import shown_path
from rft.errors import DataError, RftError

if TYPE_CHECKING:
    import torch

    from rft._native import Feed
    from rft.data.batch import Batch
    from rft.data.loader import Ring
    from rft.data.template import Renderer

AHEAD = 4
"""Windows made ahead of the slowest rank, each of 64 MiB of token ids: a step seldom takes more than a part of one."""
FIRST_WAIT = 1.0
"""Seconds before a source that fails is tried again; twice as long before each of the four further attempts."""
_TOLD_AFTER = 5.0
"""Seconds after which it is said that training waits for data."""
_TOLD_AGAIN = 60.0
FOLDER = "streams"
"""Of the windows, in the folder of prepared sets."""


@dataclass(frozen=True)
class Readers:
    """Who reads a stream together: processes of one machine."""

    token: str
    """A name that they agreed on: new for each start, so that nobody meets windows of an earlier one, and their own."""
    number: int = 0
    """Of this process on this machine; 0 makes the windows."""
    count: int = 1


@dataclass
class StreamedSet:
    """Stands where a prepared set does. `spec` is the request to the extension."""

    spec: str
    key: str
    root: Path
    """The folder of prepared sets."""
    readers: Readers
    render: Renderer | None = None
    has_started: bool = False

    @property
    def folder(self) -> Path:
        """Of this start's windows, on this machine."""
        return self.root / FOLDER / self.readers.token


class StreamLoader:
    """`rft.data.loader.Loader` over a stream: the same steps as over the prepared set under shuffle = "window"."""

    def __init__(
        self,
        streamed: StreamedSet,
        *,
        seq_len: int,
        packing: str,
        overlong: str,
        seed: int,
        pad_id: int,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int = 1,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
        balance: bool = True,
        name: str = "train",
    ):
        from rft.data.loader import check_place

        check_place(rank, world_size, micro_batch)
        self.set, self.seq_len, self.packing, self.overlong = streamed, seq_len, packing, overlong
        self.seed, self.pad_id, self.shuffle, self.name = seed, pad_id, bool(shuffle), name
        self.rank, self.world_size, self.micro_batch, self.balance = rank, world_size, micro_batch, balance
        self.device = device
        self._feed: Any = None
        self._producer: Any = None
        self._stream: Any = None
        self._lock: int | None = None
        self._begun = 0
        self._waited = self._told = 0.0
        """Seconds that the next step has been waited for, and when that was last said."""

    def plan_hash(self, epoch: int) -> str:
        """Of what decides the packs of an epoch. Of the files' content only their sizes count: they are not read for it."""
        subject = [self.set.key, self.seq_len, self.packing, self.overlong, self.seed, epoch, self.shuffle, "windows"]
        return "stream-" + hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:32]

    def share_done(self, epoch: int, steps: int, packs_per_step: int) -> float:
        """The share of the sources' bytes that an epoch's first steps are made of."""
        return 0.0 if self._feed is None else float(self._feed.share(steps * packs_per_step))

    def cursor(self, packs: int) -> dict[str, Any] | None:
        """What it takes to go on behind so many packs of the epoch that is read, beside their number."""
        text = None if self._feed is None else self._feed.cursor(packs)
        return None if text is None else dict(json.loads(text))

    def counts(self, packs: int) -> dict[str, Any]:
        """What became of the rows that the first packs of the epoch took, and of their documents since this start."""
        if self._feed is None:
            return {}
        text = self._feed.counts(packs)
        return {**(json.loads(text) if text else {}), "since_start": self._feed.totals()}

    def steps(
        self,
        epoch: int,
        packs_per_step: int,
        start_step: int = 0,
        *,
        first_pack: int = 0,
        cursor: dict[str, Any] | None = None,
    ) -> Iterator[list[Batch]]:
        """Starts, and gives this rank's micro-batches of every step from `start_step` on, on the device; waits for those not made yet.

        Without the cursor of a position everything before it is made again. Raises DataError for what the rows or the
        sources are, once every whole step before it was given.
        """
        import torch

        from rft import _native
        from rft.data.loader import ROUND_TO, Ring, check_packs_per_step

        check_packs_per_step(packs_per_step, self.micro_batch, self.world_size)
        self._stop()
        where = json.dumps(cursor) if cursor else None
        windows = self._begin(epoch, where)
        capacity = self.micro_batch * -(-self.seq_len // ROUND_TO) * ROUND_TO
        if self.packing != "none":
            capacity = self.micro_batch * self.seq_len
        with told():
            self._feed = feed = _native.Feed(
                self.set.spec,
                str(windows),
                key=self.set.key,
                seq_len=self.seq_len,
                packing=self.packing,
                overlong=self.overlong,
                seed=self.seed,
                epoch=epoch,
                shuffle=self.shuffle,
                reader=self.set.readers.number,
                cursor=where,
            )
            self._stream = _native.Stream(
                feed,
                rank=self.rank,
                world_size=self.world_size,
                micro_batch=self.micro_batch,
                packs_per_step=packs_per_step,
                start_step=start_step,
                pad_id=self.pad_id,
                capacity=capacity,
                first_pack=first_pack,
                balance=self.balance,
            )
        ring = Ring(self._stream, capacity, torch.device(self.device), weights=True, only_where_needed=True)
        ring.wait = self._wait
        return self._read(ring, feed, packs_per_step, start_step, first_pack)

    def _read(
        self, ring: Ring, feed: Feed, packs_per_step: int, start_step: int, first_pack: int
    ) -> Iterator[list[Batch]]:
        from rft.data.loader import read_steps

        step = start_step
        for micro_batches in read_steps(ring):
            yield micro_batches
            step += 1
            with told():
                feed.done(first_pack + step * packs_per_step)
        if step == start_step == 0 and first_pack == 0:
            raise DataError(
                f"data ({self.name})",
                f"no token to train on is left at seq_len {self.seq_len}",
                do='raise data.seq_len, or set data.overlong = "split"',
            )

    def ready(self, seconds: float) -> bool:
        """Whether the next step is there (or what there is in its place); waits for it, no longer than this, and says so."""
        if self._stream is None or self._stream.wait(seconds):
            self._waited = self._told = 0.0
            return True
        self._waited += seconds
        due = _TOLD_AFTER if self._told == 0 else self._told + _TOLD_AGAIN
        if self._producer is not None and self._waited >= due:
            self._told = self._waited
            log.say("data", f"training waits for the next window: {self._state_of_work()}")
        return False

    def _wait(self) -> None:
        while not self.ready(1.0):
            pass

    def _begin(self, epoch: int, cursor: str | None) -> Path:
        """The folder of the epoch's windows, in which the first process of the machine now makes them."""
        from rft import _native

        self._begun += 1
        windows = self.set.folder / f"{epoch}-{self._begun}"
        if self.set.readers.number == 0:
            if self._lock is None:
                self._lock = take_folder(self.set.folder)
            with told():
                self._producer = _native.Producer(
                    self.set.spec,
                    str(windows),
                    key=self.set.key,
                    cursor=cursor,
                    ahead=AHEAD,
                    readers=self.set.readers.count,
                    first_wait=FIRST_WAIT,
                    render=self.set.render,
                )
        while not windows.is_dir():  # the first process is a few lines behind; where it fails, the launcher ends all
            time.sleep(0.02)
        return windows

    def _state_of_work(self) -> str:
        status = self._producer.status()
        read = f"{status['rows']:,} rows read, {status['bytes'] / 1e9:.2f} of {status['bytes_total'] / 1e9:.2f} GB"
        return f"{read}; {visible_trouble(status['trouble'])}" if status["trouble"] else read

    def _stop(self) -> None:
        """The threads of the epoch before."""
        if self._stream is not None:
            self._stream.close()
        if self._producer is not None:
            self._producer.stop()
        self._stream = self._producer = None

    def close(self) -> None:
        """Stop the threads, and remove what they made."""
        self._stop()
        if self._lock is not None:
            shutil.rmtree(self.set.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                _lock_of(self.set.folder).unlink()
            os.close(self._lock)
            self._lock = None


def visible_trouble(text: str) -> str:
    """A failing source in one line."""
    return " ".join(shown_path(text).split())


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Failures of the extension as errors of rft."""
    from rft import _native

    try:
        yield
    except _native.NativeError as error:
        kind = RftError if error.kind in ("io", "full") else DataError
        raise kind(shown_path(error.where), error.problem, wanted=error.wanted, do=error.do) from None


def take_folder(folder: Path) -> int:
    """Make the folder of a start's windows and hold its lock; windows of starts that were killed are removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for other in folder.parent.glob("*.lock"):
        handle = _try_lock(other)
        if handle is not None:
            shutil.rmtree(other.with_suffix(""), ignore_errors=True)
            with contextlib.suppress(OSError):
                other.unlink()
            os.close(handle)
    handle = _try_lock(_lock_of(folder), create=True)
    assert handle is not None, "the name of a start is new"
    folder.mkdir()
    return handle


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _try_lock(path: Path, *, create: bool = False) -> int | None:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
