"""Receipts: what was asked for, applied, declined, and why. They become `receipts.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Applied:
    """Something that was done, `count` times `of` the places where it could have been."""

    what: str
    count: int
    of: int
    how: str
    checked: dict[str, float] = field(default_factory=dict)
    """Largest relative errors against the original, by name of the check."""


@dataclass
class Declined:
    """Something that was not done at `count` places, and why."""

    what: str
    count: int
    why: str


@dataclass
class Receipts:
    """Collected while a run is set up; `to_json()` is what is written."""

    asked: list[str] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)

    def ask(self, what: str) -> None:
        self.asked.append(what)

    def apply(self, what: str, count: int, of: int, how: str, checked: dict[str, float] | None = None) -> None:
        self.applied.append(Applied(what, count, of, how, dict(checked or {})))

    def decline(self, what: str, count: int, why: str) -> None:
        self.declined.append(Declined(what, count, why))

    def forget(self, what: str) -> None:
        """Take back what was said of it: something else is true now."""
        self.applied = [entry for entry in self.applied if entry.what != what]
        self.declined = [entry for entry in self.declined if entry.what != what]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
