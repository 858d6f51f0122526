"""One decided `auto`: what was chosen and why, in words that are shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """`key` ("optim.lr") was left to rft: `value`, because of `reason`."""

    key: str
    value: object
    reason: str
