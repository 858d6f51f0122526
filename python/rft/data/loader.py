"""Prepared set -> `Batch`: a plan of packs that is the same on every rank, filled by a Rust thread into buffers owned here."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rft.data.batch import Batch
from rft.data.folder import shown_path
from rft.errors import DataError

if TYPE_CHECKING:
    from rft._native import Plan, Store

_SLOTS = (
    8  # micro-batches filled ahead: one is a few 100 kB; the thread is woken for six at a time, so eight keep it ahead
)
ROUND_TO = 64  # tokens; length of a row under packing "none", as the extension rounds it
_PLANS_KEPT = 2
_KEEP_FREE = 16 << 20  # bytes


class Loader:
    """Micro-batches of one rank, step by step.

    Step k of an epoch holds packs [k P, (k + 1) P) of the plan, P = packs_per_step, dealt to the ranks so that their
    attention costs are even. Ranks run equally many micro-batches: missing packs are fillers of weight zero, and the last
    step is short.
    """

    def __init__(
        self,
        store: Store,
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
        shuffle: bool | Literal["window"] = True,
        balance: bool = True,
        name: str = "train",
    ):
        """seq_len: tokens of a pack. packing: stream, bfd, even, sequential or none. overlong: split, truncate, drop or error.

        pad_id: fills up packs; any id of the vocabulary, as nothing is learned there. micro_batch: packs of a `Batch`. shuffle: over
        the whole set, within windows of it, or not at all. balance: the packs of a step are dealt to the ranks by their cost. name: for messages.
        """
        check_place(rank, world_size, micro_batch)
        check_pad_id(pad_id, json.loads(store.manifest)["vocab_size"])
        self.store, self.seq_len, self.packing, self.overlong = store, seq_len, packing, overlong
        self.seed, self.pad_id, self.shuffle, self.name = seed, pad_id, shuffle, name
        self.rank, self.world_size, self.micro_batch, self.balance = rank, world_size, micro_batch, balance
        self.device = torch.device(device)
        self._plans: dict[int, Plan] = {}
        self._streams: set[Any] = set()

    def plan(self, epoch: int) -> Plan:
        """Which documents make which pack in this epoch: the same on every rank and for every number of ranks.

        Raises DataError where no label survives, or for a document over seq_len under overlong = "error".
        """
        if epoch not in self._plans:
            self._plans[epoch] = self._build_plan(epoch)
            while len(self._plans) > _PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
        return self._plans[epoch]

    def _build_plan(self, epoch: int) -> Plan:
        from rft import _native

        try:
            return _native.Plan(
                self.store,
                self.seq_len,
                self.packing,
                self.overlong,
                self.seed,
                epoch,
                shuffle=bool(self.shuffle),
                windows=self.shuffle == "window",
            )
        except _native.NativeError as error:
            where = error.where or f"data ({self.name})"
            raise DataError(shown_path(where), error.problem, wanted=error.wanted, do=error.do) from None

    def plan_hash(self, epoch: int) -> str:
        """Of the packs of an epoch and their order."""
        return self.plan(epoch).hash

    def share_done(self, epoch: int, steps: int, packs_per_step: int) -> float:
        """The share of an epoch that its first steps are."""
        return steps / self.steps_in_epoch(epoch, packs_per_step)

    def cursor(self, packs: int) -> dict[str, Any] | None:
        """What it takes to go on behind so many packs, beside their number: nothing, where the whole plan is known."""
        return None

    def steps_in_epoch(self, epoch: int, packs_per_step: int) -> int:
        """Optimizer steps of an epoch, the short last one included."""
        return -(-self.plan(epoch).num_packs // packs_per_step)

    def steps(
        self,
        epoch: int,
        packs_per_step: int,
        start_step: int = 0,
        *,
        first_pack: int = 0,
        cursor: dict[str, Any] | None = None,
    ) -> Iterator[list[Batch]]:
        """This rank's micro-batches of every step from `start_step` on, on the device.

        packs_per_step: of all ranks, a multiple of micro_batch * world_size. first_pack: where step 0 begins; behind the packs
        that were read before packs_per_step changed. cursor: of a position, as `cursor()` gave it.
        """
        from rft import _native

        check_packs_per_step(packs_per_step, self.micro_batch, self.world_size)
        plan = self.plan(epoch)
        capacity = self._capacity(plan)
        stream = _native.Stream(
            plan,
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
        self._streams.add(stream)
        try:
            yield from read_steps(Ring(stream, capacity, self.device, weights=self.store.has_weights))
        finally:
            self._streams.discard(stream)

    def _capacity(self, plan: Plan) -> int:
        if self.packing != "none":
            return self.micro_batch * self.seq_len
        longest = int(plan.pack_tokens().max())
        return self.micro_batch * -(-longest // ROUND_TO) * ROUND_TO

    def close(self) -> None:
        """Stop the threads of iterators that were not read to their end."""
        for stream in list(self._streams):
            stream.close()
        self._streams.clear()


def check_place(rank: int, world_size: int, micro_batch: int) -> None:
    """Raise ValueError where there is no such rank, or nothing in a micro-batch."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    if micro_batch < 1:
        raise ValueError(f"micro_batch = {micro_batch}: wanted 1 or more packs")


def check_pad_id(pad_id: int, vocab_size: int) -> None:
    """Raise ValueError where packs would be filled up with what no embedding has a row for."""
    if not 0 <= pad_id < vocab_size:
        raise ValueError(f"pad_id = {pad_id}: wanted an id of the set's vocabulary, 0 to {vocab_size - 1}")


def check_packs_per_step(packs_per_step: int, micro_batch: int, world_size: int) -> None:
    """Raises ValueError where a step is no whole number of micro-batches on every rank."""
    if packs_per_step % (micro_batch * world_size):
        raise ValueError(f"{packs_per_step} packs a step: no multiple of {micro_batch} x {world_size} ranks")


def read_steps(ring: Ring) -> Iterator[list[Batch]]:
    """Micro-batches, a step at a time; the stream below them is closed at the end."""
    owner = os.getpid()
    try:
        micro_batches: list[Batch] = []
        while True:
            if os.getpid() != owner:
                raise RuntimeError("a loader's iterator was taken over a fork, where its thread does not exist")
            filled = ring.take()
            if filled is None:
                break
            micro_batches.append(filled[0])
            if filled[1]:
                yield micro_batches
                micro_batches = []
        assert not micro_batches, "the stream ended inside a step"
    finally:
        if os.getpid() == owner:
            ring.stream.close()


class _Slot:
    """Host buffers of one micro-batch, written by the stream's thread; pinned where they are copied to a GPU."""

    def __init__(self, ids: Tensor, labels: Tensor, positions: Tensor, cu_seqlens: Tensor, weights: Tensor | None):
        self.ids, self.labels, self.positions = ids, labels, positions
        self.cu_seqlens, self.weights = cu_seqlens, weights
        self.copied: Any = None
        """CUDA event after the copy out of these buffers."""

    @classmethod
    def of(cls, capacity: int, *, pinned: bool, weights: bool) -> _Slot:
        def row(dtype: torch.dtype) -> Tensor:
            return torch.empty(1, capacity, dtype=dtype, pin_memory=pinned)

        cu_seqlens = torch.empty(capacity + 1, dtype=torch.int32, pin_memory=pinned)
        ids, labels, positions = row(torch.int64), row(torch.int64), row(torch.int64)
        return cls(ids, labels, positions, cu_seqlens, row(torch.float32) if weights else None)

    def another(self) -> _Slot:
        """New buffers of the same shapes, in ordinary memory: a quarter faster than from sizes and types."""
        like, weights = torch.empty_like, self.weights
        return _Slot(
            like(self.ids),
            like(self.labels),
            like(self.positions),
            like(self.cu_seqlens),
            None if weights is None else like(weights),
        )

    def addresses(self) -> tuple[int, int, int, int, int | None]:
        weights = None if self.weights is None else self.weights.data_ptr()
        ids, labels, positions = self.ids.data_ptr(), self.labels.data_ptr(), self.positions.data_ptr()
        return ids, labels, positions, self.cu_seqlens.data_ptr(), weights


class Ring:
    """Slots that go round. On a GPU: filled by the stream's thread, copied, handed back once the copy is done. On the CPU a
    batch keeps its buffers, and the slot gets new ones: nothing is copied."""

    def __init__(
        self, stream: Any, capacity: int, device: torch.device, *, weights: bool, only_where_needed: bool = False
    ):
        """weights: slots have room for them. only_where_needed: batches in which all are 1 come without."""
        from rft import _native

        self.stream, self.device, self.capacity = stream, device, capacity
        self.native_error = _native.NativeError
        self.only_where_needed = only_where_needed
        self.wait: Callable[[], None] | None = None
        """Called before each micro-batch is taken."""
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.copies is None:
            # glibc gives memory back whenever 128 KiB are free at the end of its heap, unless a larger block was freed once;
            # then every batch would be paid for in page faults.
            torch.empty(_KEEP_FREE, dtype=torch.uint8)
        pinned = self.copies is not None
        self.slots = [_Slot.of(capacity, pinned=pinned, weights=weights) for _ in range(_SLOTS)]
        self.waiting: deque[int] = deque()  # slots whose copy may still be under way
        self.submitted = 0
        for number in range(_SLOTS):
            self._submit(number)

    def take(self) -> tuple[Batch, bool] | None:
        """The next micro-batch and whether it is the last of its step."""
        if self.wait is not None:
            self.wait()
        if self.waiting:
            self._hand_back()
        try:
            filled = self.stream.take()
        except self.native_error as error:
            raise DataError(error.where, error.problem, wanted=error.wanted, do=error.do) from None
        if filled is None:
            return None
        self.submitted -= 1
        number, last, *told = filled
        slot = self.slots[number]
        if self.copies is None:
            self.slots[number] = slot.another()
            self._submit(number)
        else:
            self.waiting.append(number)
        return self._batch(slot, *told), last

    def _hand_back(self) -> None:
        """Submit slots whose copies are done; wait only if the thread would have none to fill."""
        while self.waiting:
            event = self.slots[self.waiting[0]].copied
            if not event.query():
                if self.submitted:
                    return
                event.synchronize()  # a copy of some 100 kB on its own stream, never behind computation
            self._submit(self.waiting.popleft())

    def _submit(self, number: int) -> None:
        self.stream.submit(number, *self.slots[number].addresses())
        self.submitted += 1

    def _batch(
        self,
        slot: _Slot,
        tokens: int,
        lengths: tuple[int, ...],
        pack_tokens: tuple[int, ...],
        num_tokens: int,
        num_label_tokens: int,
        label_weight: float,
        weighted: bool,
    ) -> Batch:
        ids, labels, positions = slot.ids, slot.labels, slot.positions
        weights = slot.weights if weighted or not self.only_where_needed else None
        if tokens != self.capacity:  # rows of their own length
            ids, labels, positions = ids[:, :tokens], labels[:, :tokens], positions[:, :tokens]
            weights = None if weights is None else weights[:, :tokens]
        cu_seqlens = slot.cu_seqlens[: len(lengths) + 1]
        if self.copies is not None:
            parts = [ids, labels, positions, cu_seqlens, *([] if weights is None else [weights])]
            ids, labels, positions, cu_seqlens, *own = self._copy(parts, slot)
            weights = own[0] if own else None
        return Batch(
            ids,
            labels,
            positions,
            cu_seqlens,
            weights,
            lengths,
            pack_tokens,
            num_tokens,
            num_label_tokens,
            label_weight,
        )

    def _copy(self, parts: list[Tensor], slot: _Slot) -> list[Tensor]:
        """On the device; the slot is free once `copied` has happened."""
        # A stream of their own: on the computing stream the copies, and with them the slots, would wait for whole steps.
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.copies):
            moved = [part.to(self.device, non_blocking=True) for part in parts]
            slot.copied = self.copies.record_event()  # type: ignore[union-attr]  # never called without
        computing.wait_event(slot.copied)
        for part in moved:
            part.record_stream(computing)
        return moved
