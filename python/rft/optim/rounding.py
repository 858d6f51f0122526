"""Stochastic rounding to bf16: up or down by chance, so that the expected value is the number itself and small updates add up.

The noise depends on (seed, step, name) alone: a resumed run draws what the uninterrupted one drew, and replicas draw the same.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class Noise:
    """Generators by name and step, one object a device, seeded anew each time."""

    def __init__(self, seed: int):
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def at(self, name: str, step: int, device: torch.device) -> torch.Generator:
        """The generator of this tensor in this step. Costs the host a hash; the device nothing."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device)
        digest = hashlib.blake2b(f"{self._seed}/{step}/{name}".encode(), digest_size=8).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def round_stochastically_(target: Tensor, source: Tensor, generator: torch.Generator) -> Tensor:
    """Write fp32 `source` into bf16 `target`, each number to one of its two neighbours with chances by distance; NaN and inf stay."""
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    # bf16 is the upper half of fp32: adding 16 random bits to the lower half carries with the right chance
    rounded = noise.add_(source.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return target.copy_(torch.where(source.isfinite(), rounded, source))


@torch.no_grad()
def store_(target: Tensor, source: Tensor, generator: torch.Generator | None) -> None:
    """Write fp32 `source` into `target` of either type; nothing where they are the same tensor."""
    if target is source or target.data_ptr() == source.data_ptr():
        return
    if target.dtype == torch.bfloat16:
        assert generator is not None, "bf16 is rounded stochastically"
        round_stochastically_(target, source, generator)
    else:
        target.copy_(source)
