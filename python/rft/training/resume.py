"""Run directories: fresh, unfinished or finished; what may change when a run goes on; where --new puts a new one."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rft import log
from rft.checkpoint.files import read_json, replace_json
from rft.checkpoint.load import Checkpoint, find_latest
from rft.config.root import Config
from rft.errors import CheckpointError, ConfigError, InUse, unusable_folder

Status = Literal["fresh", "unfinished", "finished"]
SUMMARY = "summary.json"
RESOLVED = "config.resolved.toml"
LOCK, LOG = ".lock", "run.log"
# What may differ when a run goes on (docs/resume.md). The packs of a step are compared in state.resume_state: micro_batch and
# accumulate may be dealt out anew as long as their product over all ranks stays.
MAY_CHANGE = (
    "log.*", "checkpoint.*", "parallel.*", "memory.*", "train.eval_every_steps", "train.out", "train.on_oom",
    "train.micro_batch", "data.store", "data.cache_gb", "model.cache_gb", "optim.in_backward",
    "data.train.*.path",  # the plan's hash covers what is in the files
    "data.eval.*.path",  # likewise the key of the held-out set
    "data.train.*.rows", "data.eval.*.rows", "data.allow_code",  # likewise
)  # fmt: skip
MAY_GROW = ("train.epochs", "train.max_steps")
OPEN_ENDED = ("constant", "wsd")
# Decided from the machine where the config says "auto": another machine may decide otherwise, and says so.
MACHINE = ("model.attention", "loss.chunk_rows", "train.deterministic")


@dataclass(frozen=True)
class Start:
    """How a run in this directory begins."""

    kind: Literal["fresh", "resume", "finished"]
    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()


def choose_run_dir(out: Path, *, new: bool, taken: Collection[Path] = ()) -> Path:
    """The directory of the run: `out`, or with `new` the first of `out`, `out`-2, `out`-3 ... that holds no run yet.

    taken: directories in which another run is about to begin.
    """
    number, candidate = 1, out
    while new and (candidate in taken or run_status(candidate) != "fresh"):
        number += 1
        candidate = out.with_name(f"{out.name}-{number}")
    return candidate


def run_status(run_dir: Path) -> Status:
    """`finished` once its summary is written, `unfinished` where a config or checkpoints are there."""
    if (run_dir / SUMMARY).exists():
        return "finished"
    checkpoints = run_dir / "checkpoints"
    begun = (run_dir / RESOLVED).exists() or (checkpoints.is_dir() and any(checkpoints.glob("step-*")))
    return "unfinished" if begun else "fresh"


def mark_finished(run_dir: Path, summary: dict[str, Any]) -> None:
    """The run is done: from now on starting it again only says so."""
    replace_json(run_dir / SUMMARY, summary)


def begin(run_dir: Path, config: Config, *, world_size: int = 1, decided: frozenset[str] = frozenset()) -> Start:
    """What to do in this run directory with this resolved config.

    decided: keys whose value was decided here rather than given. Raises ConfigError naming the keys that may not differ,
    CheckpointError where no checkpoint is usable. `finished` only where the config wants no more steps than were done.
    """
    status = run_status(run_dir)
    if status == "fresh":
        return Start("fresh", None)
    if status == "finished":
        read_json(run_dir / SUMMARY)  # refused by name if it is not what rft wrote
    if status == "unfinished" and config.checkpoint.resume == "never":
        raise ConfigError(
            str(run_dir),
            'holds an unfinished run, and checkpoint.resume is "never"',
            do=f"add --new: a new run in {choose_run_dir(run_dir, new=True)}",
        )
    checkpoint = find_latest(run_dir, clean=True)
    if checkpoint is None and status == "unfinished":
        return Start(
            "fresh", None, ("the run here was stopped before its first checkpoint: it starts from the beginning",)
        )
    notes, grows = compare(run_dir, config, checkpoint, world_size=world_size, decided=decided)
    if status == "finished" and not grows:
        return Start("finished", checkpoint, notes)
    if checkpoint is None:
        raise CheckpointError(
            str(run_dir),
            "the run is finished and none of its checkpoints is left to go on from",
            do=f"add --new: a new run in {choose_run_dir(run_dir, new=True)}",
        )
    return Start("resume", checkpoint, notes)


def check_resume(
    run_dir: Path, config: Config, *, world_size: int = 1, decided: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Notes on what differs and may; raises ConfigError for what may not."""
    return begin(run_dir, config, world_size=world_size, decided=decided).notes


def compare(
    run_dir: Path, config: Config, checkpoint: Checkpoint | None, *, world_size: int, decided: frozenset[str]
) -> tuple[tuple[str, ...], bool]:
    """(notes, whether the config wants more steps than the run had). Raises ConfigError naming every key that may not differ."""
    saved, saved_decided, saved_world = _saved_config(run_dir, checkpoint)
    old, new = flatten(saved), flatten(_masked(config.model_dump(mode="json")))
    notes: list[str] = []
    refused: list[str] = []
    grows = False
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after or any(fnmatch.fnmatchcase(key, pattern) for pattern in MAY_CHANGE):
            continue
        told = f"{key} is {_show(after)}, was {_show(before)}"
        if key in MAY_GROW and _more(before, after) and config.optim.schedule.name in OPEN_ENDED:
            grows = True
            notes.append(told)
        elif key in MACHINE and key in decided and key in saved_decided:
            notes.append(f"{told} (decided for this machine): losses go on equal up to rounding")
        elif key == "train.accumulate" and (saved_world != world_size or key in decided):
            continue  # dealt out anew over another number of ranks
        elif key in MAY_GROW and _more(before, after):
            refused.append(f"{told} (a {config.optim.schedule.name} schedule is a function of all its steps)")
        else:
            refused.append(told)
    if refused:
        raise ConfigError(
            str(run_dir),
            "holds a run with another config: " + "; ".join(refused),
            wanted="on going on, only log, checkpoint, parallel, memory, train.micro_batch, train.eval_every_steps, places of data, sizes of "
            "caches and the number of processes may change, and epochs or max_steps may grow under a constant or wsd schedule",
            do=f"add --new: a new run in {choose_run_dir(run_dir, new=True)}; or put the old values back",
        )
    return tuple(notes), grows


def _saved_config(run_dir: Path, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], frozenset[str], int]:
    if checkpoint is not None:
        document = checkpoint.config
        return document["config"], frozenset(document["decided"]), int(document["world_size"])
    path = run_dir / RESOLVED
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), frozenset(), 1
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error}", do=f"add --new: a new run in {choose_run_dir(run_dir, new=True)}"
        ) from None


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; what is not set is left out, so that TOML, which has no null, compares equal to JSON."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        items = enumerate(value)
    else:
        return {} if value is None or value == [] else {prefix: value}
    leaves: dict[str, Any] = {}
    for key, entry in items:
        leaves |= flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _masked(value: Any) -> Any:
    """As a saved config is: values of secret environment variables hidden."""
    if isinstance(value, dict):
        return {key: _masked(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_masked(entry) for entry in value]
    return log.mask(value) if isinstance(value, str) else value


def _more(before: Any, after: Any) -> bool:
    """Whether the run gets longer; no limit is the most."""
    return after is None or (before is not None and after > before)


def _show(value: Any) -> str:
    return "not set" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def accumulate_on_resume(packs_per_step: int, micro_batch: int, world_size: int) -> int:
    """Micro-batches of a step on each rank, so that a step keeps its packs. Raises ConfigError where that does not divide."""
    share = micro_batch * world_size
    if packs_per_step % share:
        fitting = [n for n in range(1, packs_per_step // micro_batch + 1) if packs_per_step % (micro_batch * n) == 0]
        raise ConfigError(
            "train",
            f"a step of this run has {packs_per_step} packs, which {world_size} processes with micro_batch {micro_batch} cannot share",
            wanted=f"{', '.join(map(str, fitting)) or 'fewer'} processes, or a micro_batch that divides",
            do="start another number of processes, set train.micro_batch = 1, or start a new run with --new",
        )
    return packs_per_step // share


class RunLock:
    """Held while a run works in its directory; the system gives it back when the process ends, however it ends."""

    def __init__(self, run_dir: Path, file: IO[str], made: tuple[Path, ...]):
        self.run_dir = run_dir
        self._file: IO[str] | None = file
        self._made = made

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def undo(self) -> None:
        """Release, and leave nothing behind of a run that never began."""
        if self._file is not None and run_status(self.run_dir) == "fresh":
            for path in self._made:
                with contextlib.suppress(OSError):  # a folder into which somebody else has put something stays
                    path.rmdir() if path.is_dir() else path.unlink()
        self.release()


def take_run_dir(out: Path, *, new: bool) -> RunLock:
    """Choose the directory of the run as `choose_run_dir` does, and take it for this process.

    Raises ConfigError where it cannot be made, and where another process is at work in it; with `new` the next one is taken.
    """
    taken: set[Path] = set()
    while True:
        run_dir = choose_run_dir(out, new=new, taken=taken)
        try:
            lock = lock_run_dir(run_dir)
        except InUse:
            if not new:
                raise
            taken.add(run_dir)  # a run that starts at this moment: the directory looks fresh, and is not free
            continue
        if not new or run_status(run_dir) == "fresh":
            return lock
        lock.release()  # begun and ended between the look and the lock


def lock_run_dir(run_dir: Path) -> RunLock:
    """Take the run directory for this process. Raises ConfigError where another process is at work in it, or it cannot be made."""
    path = run_dir / LOCK
    removed = 0
    while True:
        try:
            folders = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            files = [file for file in (run_dir / LOG, path) if not file.exists()]
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - open while the run lasts
        except OSError as error:
            if isinstance(error, FileNotFoundError | FileExistsError) and (removed := removed + 1) < 100:
                continue  # by a run that was refused, between two of these lines
            raise unusable_folder("train.out", run_dir, error) from None
        lock = RunLock(run_dir, file, (*files, *folders))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
            lock.release()
            raise InUse(
                str(run_dir),
                f"another run is at work here (process {owner or 'unknown'})",
                do=f"wait for it or stop it, or add --new: a new run in {choose_run_dir(run_dir, new=True, taken={run_dir})}",
            ) from None
        except OSError as error:
            lock.undo()
            raise unusable_folder("train.out", run_dir, error) from None
        if _is_same(file, path):
            break
        lock.release()  # its holder was refused and removed it: a lock on a file that is gone holds nobody off
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return lock


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False
