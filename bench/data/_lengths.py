"""Document lengths as people train on: lognormal, clipped to the pack."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DISTRIBUTIONS = {  # median, sigma, tokens of a pack
    "alpaca": (90, 0.55, 2048),
    "openhermes": (280, 0.85, 4096),
    "sharegpt": (900, 1.1, 8192),
    "longcot": (5000, 0.8, 32768),
}


def draw(name: str, count: int, seed: int = 0) -> tuple[NDArray[np.uint32], int]:
    """Lengths, and the tokens of a pack."""
    median, sigma, capacity = DISTRIBUTIONS[name]
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.clip(lengths, 4, capacity).astype(np.uint32), capacity
