"""A base in fewer bits, kept on disk, so that the next run over it reads codes instead of quantising the checkpoint again.

One safetensors file a base in `$XDG_CACHE_HOME/rft/bases`, complete or absent, whose name is a hash of all that its codes depend on: the
checkpoint's content, the linears, the code that quantises, and the kind of device (sums differ in their last bits between kinds).

Content without reading all of it (16 GB take longer to hash than to quantise): a file of the hub's cache is named by its SHA-256; of any
other, size, time of change, its head (which names every tensor) and pages spread over the rest are hashed. A file changed in place has
another time; a copy with its times (cp -a) is the same base wherever it lies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft import log
from rft.checkpoint.files import TensorSource, sync_folder, write_tensors
from rft.data.folder import default_root
from rft.errors import system_reason
from rft.kernels import int8, nf4
from rft.models.names import plain_name
from rft.models.source import ModelSource
from rft.quant import packed as packing
from rft.quant.packed import Packed, PackedLinear

FORMAT = 2
LEAST_BYTES = 16 << 20
"""Of codes: below, quantising takes under two seconds on one core of a CPU (20 million numbers a second in NF4), and nothing on a GPU."""
HEAD, PAGE, PAGES = 1 << 20, 4096, 256
"""Of a checkpoint's file that is hashed: its first MiB, and so many pages of the rest."""
_TEMPORARY_SECONDS = 3600
"""How old a file under its temporary name must be for its writer to be gone."""


@dataclass
class BaseCache:
    """The place of one base. `codes` is what `materialise` asks; after it, `finish` says what came of it."""

    path: Path
    limit: int
    """Bytes that the folder may take."""
    linears: dict[str, PackedLinear]
    """By the plain name of the weight."""
    error: float = 0.0
    """Largest relative error of a weight, as it was when the base was quantised."""
    damage: str = ""
    hits: int = 0
    _file: Any = None
    _saved: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, source: ModelSource, placed: Packed, device: torch.device, limit_gb: float) -> BaseCache | None:
        """None where nothing is kept: it is off, the base is small, or the checkpoint holds codes already."""
        if not limit_gb or placed.bytes() < LEAST_BYTES or hasattr(source.reader, "packed"):
            return None
        linears = {plain_name(f"{name}.weight"): linear for name, linear in placed.linears.items()}
        key = key_of(source, placed, linears, device)
        made = cls(default_root().with_name("bases") / f"{key}.safetensors", int(limit_gb * 1e9), linears)
        made._open()
        return made

    def _open(self) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(str(self.path), framework="pt")
            self._saved = json.loads((self._file.metadata() or {})["rft"])
            self.error = float(self._saved["error"])
        except FileNotFoundError:
            pass
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def _give_up(self, why: str) -> None:
        self._file, self.damage = None, why

    def codes(self, name: str) -> nf4.Weight | int8.Weight | None:
        """The kept codes of a weight; None where they are not there, or not what was written."""
        if self._file is None or name not in self.linears:
            return None
        linear, tensors = self.linears[name], {}
        for part, buffer in linear.named_buffers(recurse=False):
            key = f"{name}.{part}"
            try:
                tensor = self._file.get_tensor(key)
            except Exception as error:  # the library raises its own kind, and the system's for a disk that fails
                self._give_up(f"{key} cannot be read: {error}")
                return None
            if tensor.dtype != buffer.dtype or tensor.numel() != buffer.numel() or _sum(tensor) != self._sum_of(key):
                self._give_up(f"{key} is not what was written")
                return None
            tensors[part] = tensor.view(buffer.shape)
        self.hits += 1
        kind: Any = nf4.Weight if linear.kind == "nf4" else int8.Weight
        return kind(**tensors)  # type: ignore[no-any-return]

    def _sum_of(self, key: str) -> int | None:
        return self._saved["sums"].get(key) if isinstance(self._saved.get("sums"), dict) else None

    def finish(self, error: float, *, keep: bool) -> str:
        """Once the weights are in: what the receipt says of it. Writes the codes where they had to be made.

        error: the largest of what was quantised now. keep: whether this process writes (one of a machine does).
        """
        seconds = time.monotonic() - self._began
        whole = self.hits == len(self.linears)
        self.error = max(self.error if self.hits else 0.0, error)
        if whole:
            with contextlib.suppress(OSError):
                os.utime(self.path)  # when it was last used
                if keep:  # the bound may be a lower one than when they were written
                    _remove(to_remove(self.path, self.path.stat().st_size, self.limit))
            took = self._saved.get("seconds")
            before = f", {took:.1f} s when it was quantised" if isinstance(took, float | int) else ""
            return f"codes from the cache: loaded in {seconds:.1f} s{before}"
        self._file = None
        if self.damage:
            log.warn(f"{self.path} is damaged ({self.damage}): the base was quantised again")
        return self._write(seconds) if keep else f"quantised in {seconds:.1f} s"

    def _write(self, seconds: float) -> str:
        """Never ends a run: what cannot be kept is quantised the next time."""
        made = f"quantised while reading, {seconds:.1f} s"
        sources = [
            TensorSource.of(f"{name}.{part}", buffer)
            for name, linear in self.linears.items()
            for part, buffer in linear.named_buffers(recurse=False)
        ]
        size = sum(source.bytes for source in sources)
        if size > self.limit:
            return f"{made}; not kept: {size / 1e9:.2f} GB of codes, and model.cache_gb is {self.limit / 1e9:g}"
        temporary = self.path.with_name(
            f".{self.path.stem}.{uuid.uuid4().hex[:12]}.tmp"
        )  # another machine may share the folder
        began = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.path.parent)
            leaving = to_remove(self.path, size, self.limit)
            free = shutil.disk_usage(self.path.parent).free + sum(file.stat().st_size for file in leaving)
            if free < 1.1 * size:  # nothing is given up for what has no room all the same
                return f"{made}; not kept: {size / 1e9:.2f} GB of codes, and {free / 1e9:.2f} GB free at {self.path.parent}"
            removed = _remove(leaving)
            sums = {
                f"{name}.{part}": _sum(b)
                for name, m in self.linears.items()
                for part, b in m.named_buffers(recurse=False)
            }
            note = {"sums": sums, "error": self.error, "seconds": round(seconds, 3)}
            write_tensors(temporary, sources, {"rft": json.dumps(note)})
            os.replace(temporary, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return f"{made}; not kept: {self.path.parent}: {system_reason(error)}"
        took = time.monotonic() - began
        gone = f", {removed} used longest ago removed" if removed else ""
        return f"{made}; {size / 1e9:.2f} GB kept for the next run in {took:.1f} s{gone}"


def key_of(source: ModelSource, placed: Packed, linears: Mapping[str, PackedLinear], device: torch.device) -> str:
    """Of the codes that these linears get from this checkpoint on this kind of device."""
    import transformers

    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    code = [Path(str(module.__file__)).read_bytes() for module in (nf4, int8, packing)]
    depends = [
        FORMAT, placed.kind, kind, transformers.__version__, hashlib.sha256(b"".join(code)).hexdigest(),
        sorted((name, linear.out_features, linear.in_features) for name, linear in linears.items()),
        type(source.config).__name__, [content_of(file) for file in _weight_files(source)],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:32]


def _weight_files(source: ModelSource) -> list[Path]:
    return [source.path] if source.kind == "gguf" else sorted(source.path.glob("*.safetensors"))


def content_of(file: Path) -> list[Any]:
    """What stands for a file's content: see the head of this module."""
    real = file.resolve()
    size = real.stat().st_size
    if real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name):
        return [real.name, size]
    digest = hashlib.sha256()
    with open(real, "rb") as opened:
        digest.update(opened.read(HEAD))
        if size > HEAD:
            for page in range(PAGES):
                opened.seek(HEAD + (size - HEAD - PAGE) * page // (PAGES - 1))
                digest.update(opened.read(PAGE))
    return [digest.hexdigest(), size, real.stat().st_mtime_ns]


def to_remove(path: Path, size: int, limit: int) -> list[Path]:
    """Bases used longest ago that have to go, so that `size` bytes at `path` are within the limit with what stays, half-written ones included."""
    now = time.time()
    writing = [f for f in path.parent.glob(".*.tmp") if now - f.stat().st_mtime <= _TEMPORARY_SECONDS]
    kept = sorted((f for f in path.parent.glob("*.safetensors") if f != path), key=lambda f: f.stat().st_mtime)
    used = sum(file.stat().st_size for file in (*kept, *writing))
    found = []
    for file in kept:
        if used + size <= limit:
            break
        used -= file.stat().st_size
        found.append(file)
    return found


def _remove(files: list[Path]) -> int:
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def remove_leftovers(folder: Path) -> None:
    """What killed writers left."""
    for file in folder.glob(".*.tmp"):
        if time.time() - file.stat().st_mtime > _TEMPORARY_SECONDS:
            file.unlink(missing_ok=True)


def _sum(tensor: Tensor) -> int:
    """Of a tensor's bytes as 64-bit numbers, each times an odd number of its place, wrapping: another number at a place changes it, and so do
    two that change places. On the tensor's device."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    rows = words.numel() // _ROW * _ROW
    total = (words[:rows].view(-1, _ROW) * _odd(_ROW, flat.device)).sum(1)
    parts = (total, words[rows:], flat[whole:].to(torch.int64))
    return (
        sum(int((part * _odd(part.numel(), flat.device)).sum()) * (2 * i + 1) for i, part in enumerate(parts)) % 2**64
    )


_ROW = 1 << 16


def _odd(count: int, device: torch.device) -> Tensor:
    """(count,) odd int64 that look random (the golden ratio's multiples, folded)."""
    steps = torch.arange(1, count + 1, device=device, dtype=torch.int64) * -7046029254386353131
    return (steps ^ (steps >> 29)) | 1
