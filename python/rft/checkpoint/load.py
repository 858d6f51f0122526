"""Find, check and read checkpoints. Every byte is checked against the completion mark before a value is used."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.checkpoint import MARK
from rft.checkpoint.files import hash_files, looks_like_pickle, read_json, refuse_pickle
from rft.checkpoint.save import FORMAT_VERSION, MODEL, OPTIMIZER, RNG, SAVED_NAME, remove_leftovers
from rft.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files are what their mark says."""

    path: Path
    step: int
    mark: dict[str, Any]
    state: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, Any]
    skipped: tuple[str, ...] = ()
    """Newer ones that were passed over, each with the reason."""

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return sum(1 for name in self.mark["files"] if name.startswith(f"{RNG}/"))

    def rank_document(self, rank: int) -> Any:
        """What this rank saved for itself; None where the saving run had fewer ranks."""
        name = f"{RNG}/rank-{rank + 1:05d}.json"
        return read_json(self.path / name) if name in self.mark["files"] else None


class _Damaged(Exception):
    """Why a folder is no complete checkpoint."""


def find_latest(run_dir: Path, *, clean: bool = False) -> Checkpoint | None:
    """The newest complete checkpoint of a run directory, with the reasons why newer ones were passed over.

    clean: also remove what killed saves left; only for the process that holds the run directory's lock.
    None where there is none yet. Raises CheckpointError where folders of that name exist and none is complete, and where a
    file was replaced by a pickle or by something else that no interrupted save leaves behind.
    """
    root = run_dir / "checkpoints"
    if not root.is_dir():
        return None
    if clean:
        remove_leftovers(root)
    skipped: list[str] = []
    found = ((int(m[1]), p) for p in root.iterdir() if p.is_dir() and (m := SAVED_NAME.fullmatch(p.name)))
    for _, path in sorted(found, reverse=True):
        try:
            return _open(path, tuple(skipped))
        except _Damaged as reason:
            skipped.append(f"{path.name}: {reason}")
    if skipped:
        raise CheckpointError(
            str(root),
            "no checkpoint here is complete: " + "; ".join(skipped),
            wanted="at least one folder step-N as rft wrote it",
            do="bring the missing files back, or start over with --new",
        )
    return None


def open_checkpoint(path: Path, *, checked: bool = False) -> Checkpoint:
    """This very checkpoint. Raises CheckpointError naming the file that is not as it was written.

    checked: another rank of this run has just checked every byte, so sizes are enough here.
    """
    try:
        return _open(path, (), hashes=not checked)
    except _Damaged as reason:
        raise CheckpointError(
            str(path), f"the checkpoint is not complete: {reason}", do="use another checkpoint of the run"
        ) from None


def _open(path: Path, skipped: tuple[str, ...], *, hashes: bool = True) -> Checkpoint:
    if not (path / MARK).exists():
        raise _Damaged(f"it has no {MARK}, so its save never ended")
    refuse_pickle(path / MARK)
    data = (path / MARK).read_bytes()
    try:
        mark = json.loads(data)
    except ValueError:
        if data.rstrip().endswith(b"."):  # how a pickle ends, also one that is text: put here, not left by a crash
            raise CheckpointError(str(path / MARK), "is no JSON", wanted="the file as rft wrote it") from None
        raise _Damaged(f"{MARK} is no JSON") from None
    _check_mark(path, mark)
    _check_files(path, mark["files"], hashes=hashes)
    state, config, versions = (read_json(path / name) for name in ("state.json", "config.json", "versions.json"))
    return Checkpoint(path, mark["step"], mark, state, config, versions, skipped)


def _check_mark(path: Path, mark: Any) -> None:
    if not isinstance(mark, dict) or not isinstance(mark.get("files"), dict):
        raise _Damaged(f"{MARK} is not what rft writes")
    if mark.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            str(path / MARK),
            f"has format version {mark.get('format_version')!r}",
            wanted=f"version {FORMAT_VERSION}",
            do="go on with the version of rft that wrote it, or start over with --new",
        )
    if path.name != f"step-{mark.get('step')}":
        raise _Damaged(f"{MARK} says step {mark.get('step')}: the folder was renamed")
    for name, record in mark["files"].items():
        sized = isinstance(record, dict) and type(record.get("bytes")) is int and isinstance(record.get("sha256"), str)
        if not sized:
            raise _Damaged(f"{MARK} does not say what {name} was")
    missing = {"state.json", "config.json", "versions.json"} - mark["files"].keys()
    if missing:
        raise _Damaged(f"{MARK} does not list {', '.join(sorted(missing))}")
    for name in mark["files"]:
        if name.startswith("/") or ".." in Path(name).parts:
            raise CheckpointError(str(path / MARK), f"names a file outside the checkpoint: {name!r}")


def _check_files(path: Path, files: dict[str, Any], *, hashes: bool) -> None:
    """Sizes first, which cost nothing, then hashes. A file that was replaced rather than cut off is refused for good."""
    for name, record in files.items():
        file = path / name
        refuse_pickle(file)
        if not file.is_file():
            raise _Damaged(f"{name} is missing")
        size = file.stat().st_size
        if size < record["bytes"]:
            raise _Damaged(f"{name} is cut off: {size:,} of {record['bytes']:,} bytes")
        if size > record["bytes"]:
            raise _Damaged(f"{name} was changed: {size:,} bytes, {record['bytes']:,} were written")
    for folder in (MODEL, OPTIMIZER):
        for file in (path / folder).glob("*"):
            if str(file.relative_to(path)) not in files:
                kind = "a pickle" if looks_like_pickle(file) else "a file"
                raise CheckpointError(str(file), f"is {kind} that this checkpoint was not saved with", do="remove it")
    names = list(files) if hashes else []
    for name, found in zip(names, hash_files([path / name for name in names]), strict=True):
        if found.sha256 != files[name]["sha256"]:
            raise _Damaged(f"{name} was changed after it was written (its hash differs)")


# ---- tensors


@dataclass(frozen=True)
class TensorInfo:
    """A saved tensor as a whole, however many files hold its parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_infos(checkpoint: Checkpoint, part: str) -> dict[str, TensorInfo]:
    """Type and shape of every tensor of "model" or "optimizer". Raises CheckpointError where parts of one are missing."""
    folder = checkpoint.path / part
    if not folder.is_dir():
        return {}
    infos = {}
    for name, stored in _reader(folder).read_metadata().state_dict_metadata.items():
        held = sum(chunk.sizes.numel() for chunk in stored.chunks)  # type: ignore[union-attr]
        if held != stored.size.numel():  # type: ignore[union-attr]
            raise CheckpointError(str(folder), f"{name}: {held:,} of {stored.size.numel():,} numbers are there")  # type: ignore[union-attr]
        infos[name] = TensorInfo(stored.properties.dtype, tuple(stored.size))  # type: ignore[union-attr]
    return infos


def check_tensors(checkpoint: Checkpoint, part: str, into: dict[str, Tensor]) -> None:
    """Raise CheckpointError where the saved names, shapes or types are not these."""
    infos = tensor_infos(checkpoint, part)
    folder = checkpoint.path / part
    if infos.keys() != into.keys():
        lacking, surplus = sorted(into.keys() - infos.keys()), sorted(infos.keys() - into.keys())
        told = [f"lacks {_some(lacking)}"] if lacking else []
        told += [f"has {_some(surplus)}, which this config does not train"] if surplus else []
        raise CheckpointError(
            str(folder), " and ".join(told), wanted="the tensors that this config trains", do="start over with --new"
        )
    for name, tensor in into.items():
        saved, own = infos[name], TensorInfo(tensor.dtype, tuple(tensor.shape))
        if saved != own:
            raise CheckpointError(
                str(folder),
                f"{name} is {saved.dtype} {list(saved.shape)}, this model's is {own.dtype} {list(own.shape)}",
                wanted="the tensors that this config trains",
                do="start over with --new",
            )


def load_tensors(checkpoint: Checkpoint, part: str, into: dict[str, Tensor]) -> None:
    """Read "model" or "optimizer" into these tensors, in place; of a DTensor only this rank's part is read.

    Any number of ranks may have saved it. Raises CheckpointError, before a value is changed, where names, shapes or types differ.
    """
    import torch.distributed.checkpoint as dcp

    check_tensors(checkpoint, part, into)
    if into:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            # Every rank reads for itself: no plan travels, and a rank that fails cannot hold up the others.
            dcp.load(dict(into), storage_reader=_reader(checkpoint.path / part), no_dist=True)


def read_tensors(checkpoint: Checkpoint, part: str = MODEL) -> dict[str, Tensor]:
    """All tensors of "model" or "optimizer", whole, on the CPU."""
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in tensor_infos(checkpoint, part).items()}
    load_tensors(checkpoint, part, tensors)
    return tensors


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _reader(folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.HuggingFaceStorageReader(str(folder))
