"""Stochastic rounding: to a neighbour, right on average, the same noise for the same step and name."""

from __future__ import annotations

import math

import torch

from rft.optim.rounding import Noise, round_stochastically_

CPU = torch.device("cpu")


def rounded(source: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return round_stochastically_(torch.empty_like(source, dtype=torch.bfloat16), source, Noise(seed).at("w", 1, CPU))


def test_every_number_goes_to_one_of_its_neighbours_and_to_each_by_its_distance():
    low, high = 1.0, 1.0 + 2**-7  # neighbours in bf16
    for share in (0.0, 0.25, 0.9):
        source = torch.full((200_000,), low + share * (high - low))
        got = rounded(source).float()
        assert set(got.unique().tolist()) <= {low, high}
        deviation = 5 * math.sqrt(share * (1 - share) / 200_000)
        assert abs(float((got == high).float().mean()) - share) <= deviation
    source = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e-30
    got = rounded(source).float()
    assert ((got - source).abs() <= source.abs() * 2**-7).all()


def test_infinite_and_broken_numbers_stay_what_they_are():
    broken = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)  # NaN, CUDA's among them
    got = rounded(torch.cat([broken, torch.tensor([float("inf"), -float("inf"), 0.0])]))
    assert got[:3].isnan().all()
    assert got[3:].tolist() == [float("inf"), -float("inf"), 0.0]


def test_noise_depends_on_seed_step_and_name_alone():
    def draw(seed, name, step):
        return torch.rand(4, generator=Noise(seed).at(name, step, CPU)).tolist()

    noise = Noise(0)
    torch.rand(3, generator=noise.at("other", 5, CPU))
    assert torch.rand(4, generator=noise.at("w", 1, CPU)).tolist() == draw(0, "w", 1)
    assert len({tuple(draw(*a)) for a in ((0, "w", 1), (1, "w", 1), (0, "v", 1), (0, "w", 2))}) == 4
