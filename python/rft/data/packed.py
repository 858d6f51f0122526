"""A prepared set for people who train with something else: packed batches as torch tensors or numpy arrays."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rft.data.batch import Batch
from rft.data.loader import Loader, check_pad_id
from rft.data.streaming import Readers, StreamedSet, StreamLoader
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

    def state(self, epoch: int, batches: int, *, since: dict[str, Any] | None = None) -> dict[str, Any]:
        """The position behind that many batches of each rank: {"plan_hash", "epoch", "packs"}, plain JSON.

        It knows nothing of ranks, so it may be resumed on another number of them, or with another micro_batch. `batches`
        count from the epoch's beginning, or from `since`: the state of this epoch that was resumed. Raises ValueError for a
        `since` of another epoch.
        """
        plan = self._loader.plan(_count(epoch, "epoch"))
        begun = 0
        if since is not None:
            at, begun = _position(since, "plan_hash", "epoch", "packs")
            if at != epoch:
                raise ValueError(f"since is a state of epoch {at}, and epoch = {epoch}")
        packs = min(begun + _count(batches, "batches") * self._packs_at_once, plan.num_packs)
        return {"plan_hash": plan.hash, "epoch": epoch, "packs": packs}

    def resume(self, state: dict[str, Any]) -> Iterator[Batch | ArrayBatch]:
        """The rest of the epoch of a `state`, without reading what came before.

        Raises DataError where the set or an option changed since, so that the packs are no longer the same; ValueError for what
        `state` never gives.
        """
        epoch, packs = _position(state, "plan_hash", "epoch", "packs")
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


class PackedStream:
    """Data that is prepared while it is read, cut into packs: the batches of the prepared set under shuffle = "window".

    One iterator at a time. `close()` (or the end of the process) removes the windows that were made.
    """

    def __init__(
        self, config: str | Path | dict[str, Any], *, arrays: Literal["torch", "numpy"] = "torch", **options: Any
    ):
        """config: a TOML file, or its tables; `[model]` and `[data]` of it count. options: those of `StreamLoader`."""
        if arrays not in ("torch", "numpy"):
            raise ValueError(f"arrays = {arrays!r}: torch or numpy")
        streamed, vocab_size = _streamed(config, seed=options["seed"])
        check_pad_id(options["pad_id"], vocab_size)
        self._loader, self._arrays, self._begun = StreamLoader(streamed, **options), arrays, 0

    def epoch(self, epoch: int) -> Iterator[Batch | ArrayBatch]:
        """Batches of an epoch from its beginning; waits for those not made yet."""
        return self._batches(_count(epoch, "epoch"), 0, None)

    def state(self, epoch: int, batches: int) -> dict[str, Any]:
        """The position behind that many batches (of each rank) of the epoch that is read, counted from where `epoch` or `resume` began: plain JSON.

        It knows nothing of ranks, so it may be resumed on another number of them, or with another micro_batch.
        """
        packs = self._begun + _count(batches, "batches") * self._packs_at_once
        return {
            "plan_hash": self._loader.plan_hash(_count(epoch, "epoch")),
            "epoch": epoch,
            "packs": packs,
            "cursor": self._loader.cursor(packs),
        }

    def resume(self, state: dict[str, Any]) -> Iterator[Batch | ArrayBatch]:
        """The rest of the epoch of a `state`. Raises DataError where the data or an option changed since; ValueError for what
        `state` never gives."""
        epoch, packs = _position(state, "plan_hash", "epoch", "packs", "cursor")
        if not isinstance(state["cursor"], dict | None):
            raise ValueError(f"cursor = {state['cursor']!r}: wanted what state() gives")
        if self._loader.plan_hash(epoch) != state["plan_hash"]:
            raise DataError(
                "streamed data",
                "the state was saved over other packs than these",
                wanted="the files, seq_len, packing, overlong, seed and shuffle that it was saved with",
                do="open the stream as it was opened then, or begin the epoch anew",
            )
        return self._batches(epoch, packs, state["cursor"])

    def _batches(self, epoch: int, packs: int, cursor: dict[str, Any] | None) -> Iterator[Batch | ArrayBatch]:
        self._begun = packs
        for (batch,) in self._loader.steps(epoch, self._packs_at_once, first_pack=packs, cursor=cursor):
            yield batch if self._arrays == "torch" else _as_arrays(batch)

    @property
    def _packs_at_once(self) -> int:
        return self._loader.micro_batch * self._loader.world_size

    def close(self) -> None:
        """Stop the threads and remove the windows."""
        self._loader.close()

    def __del__(self) -> None:
        if hasattr(self, "_loader"):
            self._loader.close()


def _streamed(config: str | Path | dict[str, Any], *, seed: int) -> tuple[StreamedSet, int]:
    """What a config's `[model]` and `[data]` say, as a stream that this process reads alone; and the size of its vocabulary."""
    from rft.config.load import load_config
    from rft.data.prepare import prepare
    from rft.models.tokenizer import load_tokenizer

    asked = ["data.streaming=true", 'data.shuffle="window"', "train.max_steps=1"]
    loaded = load_config(config, asked)
    readers = Readers(uuid.uuid4().hex)
    tokenizer = load_tokenizer(loaded.model)
    made = prepare(loaded.data, tokenizer, seed=seed, readers=readers)
    assert isinstance(made.train, StreamedSet)
    return made.train, tokenizer.vocab_size


def _position(state: Any, *names: str) -> tuple[int, int]:
    """(epoch, packs) of a state. Raises ValueError for what is none."""
    if not isinstance(state, dict) or not set(names) <= state.keys():
        raise ValueError(f"{state!r} is no state: wanted what state() gives, {{{', '.join(names)}}}")
    return _count(state["epoch"], "epoch"), _count(state["packs"], "packs")


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
