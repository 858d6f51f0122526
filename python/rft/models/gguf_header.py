"""The header of a GGUF file: its key-value part and where its tensors lie. Vocabularies of 150,000 strings take a second."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rft.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    kind: int
    """GGML's number of the type."""
    offset: int
    """Bytes from the start of the file."""


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The key-value part of a GGUF header. Reads nothing of the weights.

    Raises ModelError for a file that is not GGUF, too old, big-endian or cut off.
    """
    return read_header(path)[0]


def read_header(path: str | Path) -> tuple[dict[str, Any], list[TensorPlace]]:
    """(key-value part, tensors) of a GGUF file. Raises as `read_metadata`."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            header = _Header(stream, str(path))
            metadata = header.read()
            return metadata, header.tensors(metadata)
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error.strerror}") from None
    except (struct.error, MemoryError, OverflowError):
        raise ModelError(str(path), "the GGUF header ends early", do="download the file again") from None


class _Header:
    def __init__(self, stream: BinaryIO, where: str):
        self.stream, self.where = stream, where
        self.num_tensors = 0

    def read(self) -> dict[str, Any]:
        if self.stream.read(4) != b"GGUF":
            raise ModelError(self.where, "not a GGUF file: it does not begin with the letters GGUF")
        (version,) = self.take("I")
        if version not in (2, 3):
            raise ModelError(self.where, f"GGUF version {version}", wanted="version 2 or 3, little-endian")
        self.num_tensors, num_keys = self.take("QQ")
        out = {}
        for _ in range(num_keys):
            key = self.text()
            (kind,) = self.take("I")
            out[key] = self.value(kind)
        return out

    def tensors(self, metadata: dict[str, Any]) -> list[TensorPlace]:
        found = []
        for _ in range(self.num_tensors):
            name = self.text()
            (dims,) = self.take("I")
            shape = tuple(reversed(self.take(f"{dims}Q")))
            found.append((name, shape, *self.take("IQ")))
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self.stream.tell() // alignment) * alignment
        return [TensorPlace(name, shape, kind, start + at) for name, shape, kind, at in found]

    def take(self, kinds: str) -> tuple[Any, ...]:
        size = struct.calcsize("<" + kinds)
        return struct.unpack("<" + kinds, self.stream.read(size))

    def text(self) -> str:
        (length,) = self.take("Q")
        raw = self.stream.read(length)
        if len(raw) != length:
            raise struct.error("cut off")
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.take("IQ")
            if inner in _SCALARS:
                return list(self.take(f"{count}{_SCALARS[inner]}"))
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(self.where, f"GGUF header holds a value of unknown type {kind}")
        return self.take(_SCALARS[kind])[0]
