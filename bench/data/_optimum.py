"""The least that the busiest rank can be made to do where each takes four packs of a step: exactly, by search.

Used to tell how far `balance` is from what is possible, and what is not.
"""

from __future__ import annotations

from itertools import accumulate

EACH = 4
EXACT = 5e-4
"""The search ends when the answer is known to this share of itself."""
MOST_PLACES = 50_000
"""Partial deals that are looked at for one question; beyond it the answer stays open."""


def at_least(costs: list[float], ranks: int, each: int = EACH) -> float:
    """No deal of these costs (falling) can do better. For each j: the j dearest packs lie with j ranks, which have 3 j more at least the
    cheapest ones and share the sum of it all, or two of them lie with one."""
    sums = [0.0, *accumulate(costs)]
    cheapest = [0.0, *accumulate(reversed(costs))]
    least = max(sums[-1] / ranks, costs[0] + cheapest[each - 1])
    for j in range(2, ranks + 1):
        apart = (sums[j] + cheapest[(each - 1) * j]) / j
        together = costs[j - 2] + costs[j - 1] + cheapest[max(each - 2, 0)]
        least = max(least, min(apart, together) if each > 1 else apart)
    return least


def optimum(costs: list[float], ranks: int, known: float) -> tuple[float, float]:
    """Bounds of the largest sum in the best deal of 4 x `ranks` packs. known: what some deal does."""
    costs = sorted(costs, reverse=True)
    low, high = at_least(costs, ranks), known
    while high - low > EXACT * low:
        middle = (low + high) / 2
        answer = _can(costs, ranks, middle, [MOST_PLACES])
        if answer is None:
            break
        low, high = (low, middle) if answer else (middle, high)
    return low, high


def _can(costs: list[float], ranks: int, most: float, places: list[int]) -> bool | None:
    """Whether a deal has no sum above `most`; none where it was not found out. costs: falling."""
    places[0] -= 1
    if places[0] < 0:
        return None
    if at_least(costs, ranks) > most * (1 + 1e-12):
        return False
    if ranks == 1:
        return True
    dearest, rest = costs[0], costs[1:]
    # What the other ranks cannot hold has to go here.
    least = sum(costs) - (ranks - 1) * most - dearest
    for three in _best(rest, most - dearest):
        if sum(rest[index] for index in three) < least * (1 - 1e-12):
            continue
        answer = _can([cost for index, cost in enumerate(rest) if index not in three], ranks - 1, most, places)
        if answer is not False:
            return answer
    return False


def _best(costs: list[float], room: float) -> list[tuple[int, int, int]]:
    """Triples that fit and of which none could be made dearer, the dearest first.

    No others have to be tried: where a deal has the cheaper one, exchanging the two makes this rank's sum larger, within the room,
    and no other's.
    """
    found: list[tuple[int, int, int]] = []
    count = len(costs)
    for i in range(count - 2):
        before = count
        for j in range(i + 1, count - 1):
            left = room - costs[i] - costs[j]
            if left < costs[-1]:
                continue
            low, high = j + 1, count - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if costs[middle] <= left else (middle + 1, high)
            if low < before:  # else one with a dearer j does as much
                before = low
                found.append((i, j, low))
    kept = [
        one
        for one in found
        if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in found)
    ]
    return sorted(kept, key=lambda three: -sum(costs[index] for index in three))
