"""Write a checkpoint that is complete or invisible, and rotate old ones.

    checkpoints/step-120/
      complete.json        the completion mark, written last: step, run, held-out loss, and size and hash of every other file
      state.json  config.json  versions.json
      rng/rank-00001.json  random state of each rank
      model/*.safetensors      trained tensors by name (sharded: each rank's part, in torch's DCP layout)
      optimizer/*.safetensors  optimizer state as "<name>::<key>"

All of it is written under a hidden name, flushed, and renamed. The hidden names below are what a killed process can leave.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft import log
from rft.checkpoint import MARK
from rft.checkpoint.files import (
    FileRecord,
    TensorSource,
    check_room,
    free_space,
    hash_files,
    read_json,
    sync_folder,
    sync_tree,
    write_error,
    write_json,
    write_tensors,
    writing,
)
from rft.errors import CheckpointError, RftError
from rft.parallel.collectives import any_over_ranks, barrier

FORMAT_VERSION = 1
MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
SAVED_NAME = re.compile(r"step-(\d+)")
FILE_BYTES = 4 * 2**30  # a file of tensors is closed at this size
SHARD_BYTES = 2**30  # DCP holds a file's tensors and its bytes in memory: a rank needs twice this while it saves


@dataclass(frozen=True)
class Mark:
    """What the completion mark says beside the list of files."""

    step: int
    run_id: str
    eval_loss: float | None = None
    """Held-out loss of exactly this step, if it was evaluated."""
    reason: str = ""


def save_checkpoint(
    root: Path,
    mark: Mark,
    *,
    model: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    documents: dict[str, Any],
    rank_document: Any,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save as `root`/step-N; called by every rank. Returns the folder once it is complete on the disk.

    model, optimizer: tensors by name, whole ones (rank 0 writes) or DTensors (every rank writes its part, none is gathered).
    documents: JSON by file name, rank 0's. rank_document: JSON of each rank. Raises CheckpointError on every rank where a
    write fails on any; what was there before stays as it was.
    """
    rank = dist.get_rank(group) if group is not None else 0
    final, work = root / f"step-{mark.step}", root / f".step-{mark.step}.saving"
    tensors = {MODEL: model, OPTIMIZER: optimizer}
    failure: RftError | None = None
    with _collecting(final) as caught:
        if rank == 0:
            _prepare(root, work, tensors)
    failure = _agree(caught, group, final, work)
    with _collecting(final) as caught:
        for name, named in tensors.items():
            if named:
                _write_part(work / name, named, group)
        write_json(work / RNG / f"rank-{rank + 1:05d}.json", rank_document)
    failure = _agree(caught, group, final, work)
    with _collecting(final) as caught:
        if rank == 0:
            for name, value in documents.items():
                write_json(work / name, value)
            _complete(work, final, mark)
    failure = _agree(caught, group, final, work)
    assert failure is None
    return final


def _prepare(root: Path, work: Path, tensors: dict[str, dict[str, Tensor]]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    needed = sum(t.numel() * t.dtype.itemsize for named in tensors.values() for t in named.values())
    check_room(root, needed + 2**20)
    work.mkdir()
    (work / RNG).mkdir()
    for name, named in tensors.items():
        if named:
            (work / name).mkdir()


def _write_part(folder: Path, named: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    if any(isinstance(tensor, DTensor) for tensor in named.values()):
        _write_shards(folder, named, group)
    elif group is None or dist.get_rank(group) == 0:
        _write_whole(folder, named)


def _write_whole(folder: Path, named: dict[str, Tensor]) -> None:
    files: list[list[TensorSource]] = []
    room = 0
    for name, tensor in named.items():
        source = TensorSource.of(name, tensor)
        if source.bytes > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(source)
        room -= source.bytes
    for number, sources in enumerate(files, start=1):
        write_tensors(folder / f"tensors-{number:05d}-of-{len(files):05d}.safetensors", sources)


def _write_shards(folder: Path, named: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Each rank its own shards, through torch's DCP over safetensors; DCP's default format would pickle its metadata."""
    import torch.distributed.checkpoint as dcp

    ranks = dist.get_world_size(group) if group is not None else 1
    writer = dcp.HuggingFaceStorageWriter(str(folder), _file_numbers(named, ranks), save_distributed=True)
    dcp.save(dict(named), storage_writer=writer, process_group=group, no_dist=group is None)


def _file_numbers(named: dict[str, Tensor], ranks: int) -> dict[str, int]:
    """Which of a rank's files holds a tensor: a new one each SHARD_BYTES of a rank's part. The same on every rank."""
    numbers, number, size = {}, 1, 0
    for name, tensor in named.items():
        own = tensor.numel() * tensor.dtype.itemsize // ranks
        if size and size + own > SHARD_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += own
    return numbers


def _complete(work: Path, final: Path, mark: Mark) -> None:
    """Hash and flush everything, write the mark, and only then give the folder its name."""
    paths = sorted(path for path in work.rglob("*") if path.is_file())
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # DCP's files and other ranks'; ours are flushed already, which costs nothing
    records: dict[str, FileRecord] = dict(
        zip((str(path.relative_to(work)) for path in paths), hash_files(paths), strict=True)
    )
    write_json(
        work / MARK,
        {
            "format_version": FORMAT_VERSION,
            "step": mark.step,
            "run_id": mark.run_id,
            "eval_loss": mark.eval_loss,
            "reason": mark.reason,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "files": {name: record.to_json() for name, record in records.items()},
        },
    )
    sync_tree(work)
    replace_folder(work, final)


def replace_folder(work: Path, final: Path) -> None:
    """Give `work` the name `final`. An older folder of that name steps aside first and is removed after; see `remove_leftovers`."""
    aside = final.with_name(f".{final.name}.replaced")
    if final.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(final, aside)
    os.rename(work, final)
    sync_folder(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves and removals left behind, and bring back a folder that had only stepped aside."""
    if not root.is_dir():
        return
    for path in list(root.iterdir()):
        if match := re.fullmatch(r"\.(step-\d+|final)\.(saving|removing|replaced)", path.name):
            place = root / match[1]
            if match[2] == "replaced" and not place.exists():
                os.rename(path, place)
            else:
                shutil.rmtree(path, ignore_errors=True)


# ---- failures


@contextlib.contextmanager
def _collecting(place: Path) -> Iterator[list[RftError]]:
    """Turns what a write raises into one error in the list, so that the ranks can agree before any of them raises."""
    caught: list[RftError] = []
    try:
        yield caught
    except RftError as error:
        caught.append(error)
    except OSError as error:
        caught.append(write_error(place, error))
    except BaseException as error:  # DCP's CheckpointException is no Exception; safetensors has a class of its own
        cause = _system_error(error)
        if cause is None:
            raise
        caught.append(write_error(place, cause))


def _system_error(error: BaseException) -> OSError | None:
    """The OSError inside an error of DCP, which wraps those of all ranks, or of safetensors, which gives only its text."""
    if isinstance(error, OSError):
        return error
    for wrapped in getattr(error, "failures", {}).values():
        if found := _system_error(wrapped[0]):
            return found
    if number_told := re.search(r"os error (\d+)|\[Errno (\d+)\]", str(error)):
        number = int(number_told[1] or number_told[2])
        return OSError(number, os.strerror(number))
    return None


def _agree(caught: list[RftError], group: dist.ProcessGroup | None, final: Path, work: Path) -> RftError | None:
    """None if no rank failed. Else the half-written folder goes, and every rank raises."""
    failed = any_over_ranks(bool(caught), group)
    if not failed:
        return None
    free = free_space(work)  # before what was written is removed again
    if group is None or dist.get_rank(group) == 0:
        shutil.rmtree(work, ignore_errors=True)
    barrier(group)
    if caught:
        raise caught[0]
    raise CheckpointError(str(final), f"another rank could not write its part of the checkpoint; {free} here")


# ---- rotation


def rotate(root: Path, run_id: str, *, keep_last: int, keep_best: int) -> list[Path]:
    """Remove this run's checkpoints but the newest `keep_last` and the `keep_best` of lowest held-out loss; returns those removed.

    Only complete folders with this run's id are counted and removed; anything else in the folder is not ours to touch.
    """
    marks: dict[int, float | None] = {}
    for path in root.iterdir():
        mark = read_mark(path)
        if mark is not None and mark.get("run_id") == run_id:
            marks[int(mark["step"])] = mark.get("eval_loss")
    evaluated = sorted((loss, step) for step, loss in marks.items() if loss is not None and loss == loss)
    kept = set(sorted(marks)[-keep_last:]) | {step for _, step in evaluated[:keep_best]}
    removed = []
    for step in sorted(set(marks) - kept):
        path, hidden = root / f"step-{step}", root / f".step-{step}.removing"
        # Renamed first: killed in the middle, no half-removed folder bears the name of a checkpoint.
        with writing(path, "the removal of an old checkpoint"):
            os.rename(path, hidden)
            shutil.rmtree(hidden)
        removed.append(path)
    if removed:
        log.detail("save", f"removed {', '.join(path.name for path in removed)}; kept {sorted(kept)}")
    return removed


def read_mark(path: Path) -> dict[str, Any] | None:
    """The completion mark of a folder named step-N, if it has a readable one that says the same N."""
    match = SAVED_NAME.fullmatch(path.name)
    if match is None or not (path / MARK).is_file():
        return None
    try:
        mark = read_json(path / MARK)
    except CheckpointError:
        return None
    return mark if isinstance(mark, dict) and mark.get("step") == int(match[1]) else None
