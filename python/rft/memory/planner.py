"""Bytes and seconds of every way to run a step -> the fastest that fits.

`sizes.py` counts bytes, `speed.py` seconds, `devices.py` what the hardware does, `modes.py` what this version can carry out. The choice: the
fastest plan that fits; among nearly as fast ones that with the fewest means, and of those the smallest that is as good as the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from rft.memory import modes
from rft.memory.plan import MemoryPlan, Place, Recompute
from rft.memory.sizes import GIB, Problem, Sizes, sizes
from rft.memory.speed import Machinery, Times, seconds
from rft.words import counted

__all__ = ["GIB", "Choice", "Given", "Planned", "Problem", "plan"]

WORTH = 0.03
"""A way to save memory is not taken for less than this share of the time."""
FILLS = 0.01
"""Memory alone is taken for less: what the GPU has is otherwise idle."""
LESS = 0.9
"""A cheaper plan takes at most this share of the memory, or it would fail again."""


@dataclass(frozen=True)
class Given:
    """What is not to be chosen. None: choose."""

    micro_batch: int | None = None
    recompute: Recompute | None = None
    recompute_layers: int | Literal["all"] | None = None
    offload: Place | None = "none"
    offload_layers: int | Literal["all"] | None = None
    tiled_mlp: int | None = None
    chunk_rows: int | Literal["least"] = 4096
    least_loss: bool = False
    """Whether "least" may be chosen in place of `chunk_rows`."""
    offload_states: Place = "none"
    offload_weights: Literal["none", "cpu"] = "none"
    in_backward: bool = False
    can_recompute: bool = True


@dataclass(frozen=True)
class Choice:
    """One way to run the step."""

    plan: MemoryPlan
    sizes: Sizes
    times: Times

    @property
    def total(self) -> int:
        """Bytes of the GPU, everything included."""
        return self.sizes.total

    @property
    def seconds(self) -> float:
        """Of the whole step on this rank, as modelled."""
        return self.times.step


@dataclass(frozen=True)
class Planned:
    """What was chosen and why, and what else there was."""

    problem: Problem
    machinery: Machinery
    chosen: Choice
    fits: bool
    alternatives: tuple[Choice, ...]

    @property
    def budget(self) -> int:
        return self.problem.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.problem.packs * self.problem.seq_len / self.chosen.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values for the run directory: bytes, seconds, tokens."""
        chosen = self.chosen
        return {
            "plan": vars(chosen.plan), "fits": self.fits, "allocated": chosen.sizes.allocated, "beside": chosen.sizes.beside,
            "peak_bytes": chosen.sizes.peak, "limit_bytes": self.budget, "host_bytes": chosen.sizes.host, "disk_bytes": chosen.sizes.disk,
            "moment": chosen.sizes.moment, "seconds": chosen.times.parts, "step_seconds": chosen.seconds,
            "tokens_per_second": self.tokens_per_second, "rates": self.machinery.rates.source, "alternatives": self.nearest(),
        }  # fmt: skip

    def why_micro_batch(self) -> str:
        choice = self.chosen
        fuller = [
            a
            for a in self.alternatives
            if _but(a, choice, "micro_batch") and a.plan.micro_batch > choice.plan.micro_batch
        ]
        if not self.fits:
            return f"the least; needs about {_gib(choice.total)} of {_gib(self.budget)} GiB all the same"
        if any(a.total > self.budget for a in fuller):
            return f"the most that fits: about {_gib(choice.total)} of {_gib(self.budget)} GiB"
        if fuller:
            return f"fills the GPU; more would gain under {FILLS:.0%} (about {_gib(choice.total)} GiB)"
        takes = f"about {_gib(choice.total)} of {_gib(self.budget)} GiB"
        if choice.plan.micro_batch < self.problem.packs:
            return f"{takes}; with more at once more would have to be computed again or moved"
        return f"the whole step at once takes {takes}"

    def why_recompute(self) -> str:
        choice = self.chosen
        if choice.plan.recompute == "none":
            return f"about {_gib(choice.total)} of {_gib(self.budget)} GiB without it"
        without = _gib(self._without(recompute="none", recompute_layers=None))
        return f"about {_gib(choice.total)} of {_gib(self.budget)} GiB; without it {without}"

    def why_recompute_layers(self) -> str:
        return self._why_layers("recompute_layers", "recompute")

    def why_offload_layers(self) -> str:
        return self._why_layers("offload_layers", "offload")

    def _why_layers(self, key: str, mode: str) -> str:
        chosen = self.chosen.plan
        if getattr(chosen, mode) == "none":
            return f"memory.{mode} is none"
        if getattr(chosen, key) is None:
            return "as many as there are"
        return f"of {counted(self.problem.facts.num_layers, 'layer')}, the fewest with which it fits"

    def why_chunk_rows(self) -> str:
        if self.chosen.plan.chunk_rows == "least":
            return f"more logits at a time would need {_gib(self._without(chunk_rows=4096))} GiB"
        vocabulary = self.problem.facts.vocab_size
        return f"logits of {vocabulary:,} tokens for so many rows at a time"

    def why_offload(self) -> str:
        choice = self.chosen
        if choice.plan.offload == "none":
            return "fits without it" if self.fits else "would not be enough"
        host = f"{_gib(choice.sizes.host)} GiB of the machine's memory"
        return f"{host}; without it the GPU would need {_gib(self._without(offload='none'))} GiB"

    def why_tiled_mlp(self) -> str:
        if self.chosen.plan.tiled_mlp == 1:
            return "whole MLPs fit" if self.fits else "would not be enough"
        return f"whole MLPs would need {_gib(self._without(tiled_mlp=1))} GiB"

    def _without(self, **changes: object) -> int:
        plain = replace(self.chosen.plan, **changes)  # type: ignore[arg-type]
        return sizes(self.problem, plain).total

    def nearest(self, count: int = 2) -> list[str]:
        """The nearest alternatives with their cost: less memory first, then faster ones that do not fit."""
        chosen = self.chosen
        smaller = sorted(
            (a for a in self.alternatives if a.total < LESS * chosen.total), key=lambda a: (a.seconds, a.total)
        )
        words = [compare(chosen, a) for a in _front(smaller)[:count]]
        if len(words) < count:
            faster = [
                a for a in self.alternatives if a.seconds < chosen.seconds * (1 - WORTH) and a.total > self.budget
            ]
            words += [compare(chosen, a) for a in sorted(faster, key=lambda a: a.total)[: count - len(words)]]
        return words

    def cheaper(self, than: MemoryPlan | None = None) -> MemoryPlan | None:
        """The fastest plan with the same micro-batch that takes at least a tenth less memory than `than`; None: there is none."""
        old = sizes(self.problem, than or self.chosen.plan).total
        micro_batch = (than or self.chosen.plan).micro_batch
        smaller = [a for a in self.alternatives if a.total <= LESS * old and a.plan.micro_batch == micro_batch]
        return min(smaller, key=lambda a: a.seconds).plan if smaller else None

    def cheapest_change(self) -> str | None:
        """In words, what to set for the next cheaper plan."""
        found = self.cheaper()
        if found is None:
            smaller = [a for a in self.alternatives if a.total <= LESS * self.chosen.total]
            if not smaller:
                return None
            return "set " + compare(self.chosen, min(smaller, key=lambda a: a.seconds), keys=True)
        return "set " + compare(self.chosen, next(a for a in self.alternatives if a.plan == found), keys=True)

    def largest(self, count: int = 3) -> list[tuple[str, int]]:
        """The largest categories of the chosen plan."""
        return self.chosen.sizes.largest(count)


def _but(a: Choice, b: Choice, key: str) -> bool:
    """Whether two plans differ in that key alone."""
    return replace(a.plan, **{key: getattr(b.plan, key)}) == b.plan


def _front(by_time: list[Choice]) -> list[Choice]:
    """Those of which none faster takes less memory."""
    front: list[Choice] = []
    for choice in by_time:
        if not front or choice.total < LESS * front[-1].total:
            front.append(choice)
    return front


_KEYS = {
    "micro_batch": "train.micro_batch",
    "recompute": "memory.recompute",
    "recompute_layers": "memory.recompute_layers",
    "offload": "memory.offload",
    "offload_layers": "memory.offload_layers",
    "tiled_mlp": "memory.tiled_mlp",
    "chunk_rows": "loss.chunk_rows",
    "offload_states": "memory.offload_states",
    "offload_weights": "memory.offload_weights",
    "in_backward": "optim.in_backward",
}


def compare(one: Choice, other: Choice, *, keys: bool = False) -> str:
    """`recompute full: -14.2 GiB, 9 % slower`; keys: as the config spells them."""
    parts = []
    for name, key in _KEYS.items():
        value = getattr(other.plan, name)
        if value != getattr(one.plan, name):
            value = "all" if value is None else value
            if keys:
                shown = f'"{value}"' if isinstance(value, str) else str(value).lower()
                parts.append(f"{key} = {shown}")
            else:
                every = f"every {value}" if name == "recompute" and isinstance(value, int) else str(value)
                parts.append(f"{name.replace('_', ' ')} {every}")
    gib = (other.total - one.total) / GIB
    ratio = other.seconds / one.seconds - 1
    speed = (
        f"{ratio:.0%} slower"
        if ratio >= 0.005
        else f"{1 / (1 + ratio) - 1:.0%} faster"
        if ratio <= -0.005
        else "as fast"
    )
    return f"{', '.join(parts)}: {gib:+.1f} GiB, {speed}".replace("%", " %")


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"


def choices(problem: Problem, given: Given, machinery: Machinery) -> Iterator[Choice]:
    """Every way to run the step that this version has."""
    batches = [given.micro_batch] if given.micro_batch else divisors(problem.packs)
    kinds: tuple[Recompute, ...] = modes.RECOMPUTE
    if given.offload_weights != "none":  # every layer is computed again
        kinds, given = ("selective", "full"), replace(given, recompute_layers="all")
    if given.recompute is not None:
        kinds = (given.recompute,)
    elif not given.can_recompute:
        kinds = ("none",)
    places: tuple[Place, ...] = modes.OFFLOAD if given.offload is None else (given.offload,)
    tiles = modes.TILES if given.tiled_mlp is None else (given.tiled_mlp,)
    rows: list[int | Literal["least"]] = [given.chunk_rows, *(["least"] if given.least_loss else [])]  # type: ignore[list-item]
    for kind, place, tile, chunk_rows, batch in product(kinds, places, tiles, rows, reversed(batches)):
        for again in _levels(problem, given.recompute_layers, kind, free=given.recompute is None):
            for moved in _levels(problem, given.offload_layers, place, free=given.offload is None and place == "cpu"):
                yield _choice(problem, machinery, MemoryPlan(
                    recompute=kind, recompute_layers=again, offload=place, offload_layers=moved, tiled_mlp=tile, chunk_rows=chunk_rows,
                    micro_batch=batch, offload_states=given.offload_states, offload_weights=given.offload_weights,
                    in_backward=given.in_backward,
                ))  # fmt: skip


def _choice(problem: Problem, machinery: Machinery, made: MemoryPlan) -> Choice:
    return Choice(made, sizes(problem, made), seconds(problem, made, machinery))


def _levels(
    problem: Problem, given: int | Literal["all"] | None, mode: Recompute | Place, *, free: bool
) -> list[int | None]:
    """Numbers of layers that are tried of a way to save memory; None: all. free: whether the way itself is to be chosen."""
    L = problem.facts.num_layers
    if mode == "none" or given == "all" or (given is None and not free):
        return [None]
    if given is not None:
        return [given]
    step = math.ceil(L / modes.LEVELS)
    return [*range(step, L, step), None]


def _refined(problem: Problem, given: Given, machinery: Machinery, chosen: Choice) -> Choice:
    """The fastest that fits among plans with other numbers of layers than those that were tried; of equals, the one that moves the least."""
    L, made = problem.facts.num_layers, chosen.plan
    if made.offload_weights != "none":
        given = replace(given, recompute_layers="all")

    def up_to(count: int | None, levels: int) -> list[int | None]:
        """All numbers up to the one that was chosen, where there was a choice."""
        return [count] if levels == 1 else [*range(1, count or L), count]

    again = _levels(problem, given.recompute_layers, made.recompute, free=given.recompute is None)
    moved = _levels(problem, given.offload_layers, made.offload, free=given.offload is None and made.offload == "cpu")
    tried = [
        _choice(problem, machinery, replace(made, recompute_layers=r, offload_layers=o))
        for r in up_to(made.recompute_layers, len(again))
        for o in up_to(made.offload_layers, len(moved))
    ]
    fitting = [c for c in tried if fits(problem, c)]
    fastest = min(c.seconds for c in fitting)
    near = [c for c in fitting if c.seconds <= fastest * 1.001]
    return min(near, key=lambda c: (c.sizes.host, c.seconds))


def fits(problem: Problem, choice: Choice) -> bool:
    """On the GPU, and what is offloaded into the machine's memory."""
    return choice.total <= problem.memory_bytes and choice.sizes.host <= (problem.host_bytes or choice.sizes.host)


def divisors(number: int) -> list[int]:
    """Of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def plan(problem: Problem, given: Given, machinery: Machinery) -> Planned:
    """The fastest that fits; among nearly as fast ones that with the fewest means, then the smallest, with as few layers computed again
    or offloaded as fit. Where nothing fits, the smallest, and `fits` is False."""
    every = tuple(choices(problem, given, machinery))
    fitting = [c for c in every if fits(problem, c)]
    if not fitting:
        return Planned(problem, machinery, min(every, key=lambda c: c.total), False, every)
    fastest = min(c.seconds for c in fitting)
    near = [c for c in fitting if c.seconds <= fastest * (1 + WORTH)]
    fewest = min(_means(c.plan) for c in near)
    plainest = [c for c in near if _means(c.plan) == fewest]
    fastest = min(c.seconds for c in plainest)
    chosen = min((c for c in plainest if c.seconds <= fastest * (1 + FILLS)), key=lambda c: (c.total, c.seconds))
    return Planned(problem, machinery, _refined(problem, given, machinery, chosen), True, every)


def _means(made: MemoryPlan) -> int:
    """How many ways to save memory it takes: none is taken without need."""
    return (made.recompute != "none") + (made.offload != "none") + (made.tiled_mlp > 1) + (made.chunk_rows == "least")


def planned(problem: Problem, chosen: MemoryPlan, given: Given, machinery: Machinery) -> Planned:
    """A plan that is decided already, beside what else there is."""
    made = Choice(chosen, sizes(problem, chosen), seconds(problem, chosen, machinery))
    return Planned(problem, machinery, made, fits(problem, made), tuple(choices(problem, given, machinery)))


def again(old: Planned, problem: Problem) -> Planned:
    """The same plans for a problem of which more is known by now."""

    def at(choice: Choice) -> Choice:
        return Choice(choice.plan, sizes(problem, choice.plan), seconds(problem, choice.plan, old.machinery))

    chosen = at(old.chosen)
    return Planned(problem, old.machinery, chosen, fits(problem, chosen), tuple(at(a) for a in old.alternatives))
