"""Whose fault numbers are that are none: base weights that hold NaN or infinities are named, before anything else is blamed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rft.errors import ModelError, RftError, TrainingError
from rft.models.source import ModelSource
from rft.models.tensor_reader import TensorReader

_ELEMENTS = 16 * 2**20
"""Read at a time: 64 MiB in fp32."""


@dataclass(frozen=True)
class BadTensor:
    """A tensor of a checkpoint with values that are no numbers."""

    name: str
    num_nan: int
    num_infinite: int
    num_values: int

    def __str__(self) -> str:
        kinds = [f"{n:,} {what}" for n, what in ((self.num_nan, "NaN"), (self.num_infinite, "infinite")) if n]
        return f"{' and '.join(kinds)} of its {self.num_values:,} values"


def find_bad_tensor(reader: TensorReader) -> BadTensor | None:
    """The first tensor of the files that is not finite. Reads all of them, a block of rows at a time."""
    for name in reader.names():
        shape = reader.shape(name)
        counts = [0, 0, 0]
        step = max(1, _ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
        for start in range(0, shape[0] if shape else 1, step):
            rest = tuple(slice(0, size) for size in shape[1:])
            part = (slice(start, min(start + step, shape[0])), *rest) if shape else None
            values = reader.read(name, part)
            counts[2] += values.numel()
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                counts[0] += int(torch.isnan(values).sum())
                counts[1] += int(torch.isinf(values).sum())
        if counts[0] or counts[1]:
            return BadTensor(name, *counts)
    return None


def useless_numbers(source: ModelSource | None, problem: str, *, where: str = "", do: str = "") -> RftError:
    """The error for a result that is not finite: the base weights' where they are the cause, else as given.

    where, problem, do: of the TrainingError that it is if the base weights are sound.
    """
    bad = find_bad_tensor(source.reader) if source is not None else None
    if bad is None or source is None:
        return TrainingError(where or "model", problem, do=do or 'try train.precision = "fp32"')
    return ModelError(
        f"{source.path}: {bad.name}",
        f"{bad} are no numbers, so nothing that is computed with them is ({where + ': ' if where else ''}{problem})",
        wanted="finite weights",
        do="download or convert the model again; no setting of the training mends its weights",
    )
