"""A prepared set for people who train with something else: packed batches as torch tensors or numpy arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rft.data.batch import Batch
from rft.data.loader import Loader
from rft.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rft._native import Store


@dataclass(frozen=True)
class ArrayBatch:
    """`Batch` with numpy arrays: the same names, shapes and types."""

    input_ids: NDArray[Any]
    labels: NDArray[Any]
    position_ids: NDArray[Any]
    cu_seqlens: NDArray[Any]
    weights: NDArray[Any] | None
    lengths: tuple[int, ...]
    pack_tokens: tuple[int, ...]
    num_tokens: int
    num_label_tokens: int
    label_weight: float


def open_store(path: str | Path) -> Store:
    """The prepared set in a folder. Raises DataError where it is none, or not whole."""
    from rft import _native

    try:
        return _native.Store(str(path))
    except _native.NativeError as error:
        raise DataError(
            error.where or str(path),
            error.problem,
            wanted="the folder of a prepared set",
            do=error.do or "run rft prepare",
        ) from None


class PackedSet:
    """A prepared set cut into packs. The same arguments give the same batches, on any machine and from any start.

    `pad_id`, `rank`, `world_size`, `micro_batch` and `device` change who gets which packs and how, and not what is in them.
    """

    def __init__(self, path: str | Path, *, arrays: Literal["torch", "numpy"] = "torch", **options: Any):
        """options: those of `rft.data.loader.Loader`."""
        if arrays not in ("torch", "numpy"):
            raise ValueError(f"arrays = {arrays!r}: torch or numpy")
        self._loader, self._arrays = Loader(open_store(path), **options), arrays

    def batches_in_epoch(self, epoch: int) -> int:
        """Batches that each rank gets."""
        return self._loader.steps_in_epoch(epoch, self._packs_at_once)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch | ArrayBatch]:
        """Batches of an epoch from number `start` on, in an order that depends on the seed and the epoch."""
        return self._batches(_count(epoch, "epoch"), _count(start, "start") * self._packs_at_once)

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """The position behind that many batches of each rank: {"plan_hash", "epoch", "packs"}, plain JSON.

        It knows nothing of ranks, so it may be resumed on another number of them, or with another micro_batch.
        """
        plan = self._loader.plan(_count(epoch, "epoch"))
        packs = min(_count(batches, "batches") * self._packs_at_once, plan.num_packs)
        return {"plan_hash": plan.hash, "epoch": epoch, "packs": packs}

    def resume(self, state: dict[str, Any]) -> Iterator[Batch | ArrayBatch]:
        """The rest of the epoch of a `state`, without reading what came before.

        Raises DataError where the set or an option changed since, so that the packs are no longer the same; ValueError for what
        `state` never gives.
        """
        if not isinstance(state, dict) or not {"plan_hash", "epoch", "packs"} <= state.keys():
            raise ValueError(f"{state!r} is no state: wanted what state() gives, {{plan_hash, epoch, packs}}")
        epoch, packs = _count(state["epoch"], "epoch"), _count(state["packs"], "packs")
        plan = self._loader.plan(epoch)
        if plan.hash != state["plan_hash"]:
            raise DataError(
                self._loader.store.path,
                "the state was saved over other packs than these",
                wanted="the set, seq_len, packing, overlong, seed and shuffle that it was saved with",
                do="open the set as it was opened then, or begin the epoch anew",
            )
        if packs > plan.num_packs:
            raise ValueError(f"the state lies behind {packs} packs, and epoch {epoch} has {plan.num_packs}")
        return self._batches(epoch, packs)

    def _batches(self, epoch: int, first_pack: int) -> Iterator[Batch | ArrayBatch]:
        for (batch,) in self._loader.steps(epoch, self._packs_at_once, first_pack=first_pack):
            yield batch if self._arrays == "torch" else _as_arrays(batch)

    @property
    def _packs_at_once(self) -> int:
        return self._loader.micro_batch * self._loader.world_size

    def close(self) -> None:
        """Stop the threads of iterators that were not read to their end."""
        self._loader.close()


def _count(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} = {value!r}: wanted a whole number from 0 up")
    return number


def _as_arrays(batch: Batch) -> ArrayBatch:
    return ArrayBatch(
        input_ids=batch.input_ids.cpu().numpy(),
        labels=batch.labels.cpu().numpy(),
        position_ids=batch.position_ids.cpu().numpy(),
        cu_seqlens=batch.cu_seqlens.cpu().numpy(),
        weights=None if batch.weights is None else batch.weights.cpu().numpy(),
        lengths=batch.lengths,
        pack_tokens=batch.pack_tokens,
        num_tokens=batch.num_tokens,
        num_label_tokens=batch.num_label_tokens,
        label_weight=batch.label_weight,
    )
