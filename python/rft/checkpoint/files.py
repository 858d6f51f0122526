"""Files that survive a crash: written, flushed to the disk, hashed; and read back without running anything that is in them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft import log
from rft.errors import CheckpointError

CHUNK = 8 * 1024 * 1024
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class FileRecord:
    """What a complete file is."""

    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sha256}


# ---- writing


def write_bytes(path: Path, data: bytes) -> None:
    """Write and flush to the disk."""
    with open(path, "wb") as file:
        file.write(data)
        _sync(file)


def write_json(path: Path, value: Any) -> None:
    """Write JSON and flush to the disk; secrets of the environment are masked."""
    write_bytes(path, (log.mask(json.dumps(value, indent=1)) + "\n").encode())


def replace_json(path: Path, value: Any) -> None:
    """Write JSON so that at every instant the old or the new content is there, whole."""
    temporary = path.with_name(f".{path.name}.saving")
    with writing(path):
        write_json(temporary, value)
        os.replace(temporary, path)
        sync_folder(path.parent)


@dataclass(frozen=True)
class TensorSource:
    """A tensor that is fetched when its turn to be written has come, so that only one is held at a time."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor | Iterable[Tensor] | None]
    """The values, whole or as blocks of rows end to end; None on a rank that only takes part in gathering them."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSource:
        """A tensor that is at hand."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def write_tensors(path: Path, sources: Sequence[TensorSource], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, one tensor (or block of rows) in memory at a time, flushed to the disk."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for source in sources:
        header[source.name] = {
            "dtype": _DTYPES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [offset, offset + source.bytes],
        }
        offset += source.bytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # tensors start at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for source in sources:
            values = source.fetch()
            assert values is not None, source.name
            written = 0
            for block in (values,) if isinstance(values, Tensor) else values:
                assert (tuple(block.shape[1:]), block.dtype) == (source.shape[1:], source.dtype), source.name
                for piece in _pieces(block):
                    written += file.write(piece)
            assert written == source.bytes, f"{source.name}: {written} of {source.bytes} bytes"
        _sync(file)


def _pieces(tensor: Tensor) -> Iterable[memoryview]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Flush a file that someone else wrote."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder: names in it survive a power cut from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Flush a folder and the folders in it."""
    for folder, _, _ in os.walk(path, topdown=False):
        sync_folder(Path(folder))


@contextlib.contextmanager
def writing(path: Path, what: str = "the checkpoint") -> Iterator[None]:
    """Around writes below `path`: what the system says about them becomes a CheckpointError that names the place."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error, what) from error


def write_error(path: Path, error: OSError, what: str = "the checkpoint") -> CheckpointError:
    """The user's words for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        quota = " (your quota is used up)" if error.errno == errno.EDQUOT else ""
        return CheckpointError(
            str(path),
            f"the disk is full{quota}: {what} could not be written; {free_space(path)}",
            wanted="room for one more checkpoint beside those that are kept",
            do="free some space and start the same command again: it goes on from the last complete checkpoint",
        )
    return CheckpointError(
        str(path),
        f"{what} could not be written: {os.strerror(error.errno) if error.errno else error}",
        do="see to the disk or the permissions and start the same command again",
    )


def free_space(path: Path) -> str:
    """`0.1 GiB free of 2.0 GiB` on the disk that holds the path."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB"


def check_room(path: Path, needed: int, what: str = "the checkpoint") -> None:
    """Raise CheckpointError before anything is written if it cannot fit."""
    with writing(path, what):
        free = shutil.disk_usage(path).free
    if free < needed:
        raise CheckpointError(
            str(path),
            f"the disk is full: {what} needs {needed / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free",
            wanted="room for one more checkpoint beside those that are kept",
            do="free some space and start the same command again: it goes on from the last complete checkpoint",
        )


# ---- reading


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file as it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())


def hash_files(paths: Sequence[Path]) -> list[FileRecord]:
    """Of many files at once: hashing runs outside the GIL, at about 1.7 GB/s a thread."""
    with ThreadPoolExecutor(max_workers=min(16, max(1, len(paths)))) as pool:
        return list(pool.map(hash_file, paths))


def looks_like_pickle(path: Path) -> bool:
    """Whether the bytes are a pickle's (protocol 2 and later) or torch.save's zip: rft reads neither, whatever the name says."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError:
        return False
    if head[8:] == b"{":  # a safetensors file: the length of its header may well begin with the bytes of a pickle
        return False
    return (len(head) >= 2 and head[0] == 0x80 and head[1] <= 5) or head[:4] == b"PK\x03\x04"


def refuse_pickle(path: Path) -> None:
    """Raise CheckpointError naming the file if it holds a pickle."""
    if looks_like_pickle(path):
        raise CheckpointError(
            str(path),
            "the file holds a pickle, which could run code when it is read; rft reads none and did not open it",
            wanted="safetensors and JSON files as rft wrote them",
            do="find out who replaced the file; go on from another checkpoint, or start over with --new",
        )


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises CheckpointError naming the file where it is missing, a pickle, or no JSON."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror or error}") from None
    refuse_pickle(path)
    try:
        return json.loads(data.decode("utf-8"))
    except ValueError:
        raise CheckpointError(
            str(path),
            "is no JSON: it was cut off, or something else was put in its place",
            wanted="the file as rft wrote it",
            do="go on from another checkpoint, or start over with --new",
        ) from None
