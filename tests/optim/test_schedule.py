"""Rates of every step: planned, exact, and the same after a resume."""

from __future__ import annotations

import math

import pytest

from rft.config.optim import ConstantSchedule, CosineSchedule, LinearSchedule, WsdSchedule
from rft.errors import ConfigError
from rft.optim.schedule import Schedule, warmup_steps


def rates(schedule: Schedule, steps: int) -> list[float]:
    used = []
    for _ in range(steps):
        used.append(schedule.lr)
        schedule.step()
    return used


def make(config, total: int, lr: float = 1e-5, position: int = 0) -> Schedule:
    return Schedule(config, total, [{"lr": lr}], position)


def test_linear_decay_uses_exactly_these_rates_straight_and_resumed():  # BO-25
    config = LinearSchedule(warmup_steps=0)
    straight = rates(make(config, 10), 10)
    assert straight == pytest.approx([1e-5 * n / 10 for n in range(10, 0, -1)], rel=1e-15)
    before, after = rates(make(config, 10), 5), rates(make(config, 10, position=5), 5)
    assert before + after == straight  # bit-equal


def test_the_curve_ends_at_its_end_value_where_the_run_ends():  # BO-24
    for config in (LinearSchedule(warmup_ratio=0.1, min_ratio=0.2), CosineSchedule(warmup_ratio=0.1, min_ratio=0.2)):
        schedule = make(config, 26, lr=1.0)
        used = rates(schedule, 26)
        assert schedule.lr == pytest.approx(0.2), "what a 27th step would use"
        assert used[-1] > 0.2
        assert used[-1] < used[-2], "the last step lies on the curve"


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (CosineSchedule(warmup_ratio=0.1), 3),
        (CosineSchedule(warmup_steps=7), 7),
        (CosineSchedule(), math.ceil(0.03 * 26)),
        (CosineSchedule(warmup_steps=0), 0),
    ],
    ids=["ratio rounds up", "explicit", "default", "none"],
)
def test_warm_up_of_26_steps(config, steps):  # BO-24
    assert warmup_steps(config, 26) == steps


def test_a_ratio_that_is_whole_steps_is_not_rounded_up():
    assert warmup_steps(CosineSchedule(warmup_ratio=0.1), 30) == 3


def test_both_kinds_of_warm_up_are_an_error():  # BO-24
    with pytest.raises(ConfigError, match="both given"):
        warmup_steps(CosineSchedule(warmup_steps=7, warmup_ratio=0.1), 26)


def test_a_warm_up_longer_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match="the run has 5"):
        warmup_steps(CosineSchedule(warmup_steps=6), 5)


def test_warm_up_rises_to_the_full_rate_and_wastes_no_step_at_zero():
    used = rates(make(ConstantSchedule(warmup_steps=4), 8, lr=1.0), 8)
    assert used == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_cosine_is_half_a_cosine():
    used = rates(make(CosineSchedule(warmup_steps=0), 4, lr=1.0), 4)
    assert used == pytest.approx([1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.5 - 0.5 * math.cos(math.pi / 4)])


def test_wsd_is_stable_and_then_falls_over_its_last_steps():
    used = rates(make(WsdSchedule(warmup_steps=2, decay_ratio=0.4), 10, lr=1.0), 10)
    assert used == pytest.approx([0.5, 1, 1, 1, 1, 1, 1.0, 0.75, 0.5, 0.25])


def test_every_group_keeps_its_own_peak():
    groups = [{"lr": 1.0}, {"lr": 0.1}]
    schedule = Schedule(LinearSchedule(warmup_steps=0), 4, groups)
    schedule.step()
    assert [group["lr"] for group in groups] == pytest.approx([0.75, 0.075])


def test_schedule_knows_nothing_of_the_clock():
    """Setting the step twice, or jumping, gives the same rate as walking there."""
    walked, jumped = make(CosineSchedule(warmup_steps=3), 20), make(CosineSchedule(warmup_steps=3), 20)
    rates(walked, 11)
    jumped.set_step(15)
    jumped.set_step(11)
    assert walked.lr == jumped.lr
