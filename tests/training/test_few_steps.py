"""A first try on little data is told that it is over before it began."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rft.training.decision import Decision
from rft.training.headline import tell_few_steps, tell_larger_step

LEFT_TO_US = [Decision("train.tokens_per_step", 32768, "default")]


def run(steps: int, *, decisions=LEFT_TO_US, max_steps=None, step=0):
    train = SimpleNamespace(max_steps=max_steps, tokens_per_step=32768)
    loader = SimpleNamespace(plan=lambda epoch: SimpleNamespace(num_tokens=90_000))
    state = SimpleNamespace(step=step)
    return SimpleNamespace(
        total_steps=steps,
        config=SimpleNamespace(train=train, data=SimpleNamespace(seq_len=512)),
        decisions=decisions,
        loader=loader,
        state=state,
    )


def test_a_run_of_few_steps_names_the_key_and_a_value(capsys):
    tell_few_steps(run(3))
    told = capsys.readouterr().err
    assert "the whole run is 3 steps: a step takes up to 32,768 tokens, and an epoch has 90,000" in told
    assert "set train.tokens_per_step = 1800 or so, or more train.epochs" in told


@pytest.mark.parametrize(
    "options", [{"steps": 10}, {"steps": 3, "max_steps": 3}, {"steps": 3, "decisions": []}, {"steps": 3, "step": 1}]
)
def test_runs_that_were_meant_so_or_are_long_enough_are_told_nothing(options, capsys):
    tell_few_steps(run(**options))
    assert capsys.readouterr().err == ""


def step_of(given: int, packs: int, *, world: int = 1, accumulate=None):
    train = SimpleNamespace(tokens_per_step=given, accumulate=accumulate)
    data = SimpleNamespace(seq_len=256, packing="stream")
    return SimpleNamespace(
        config=SimpleNamespace(train=train, data=data), decisions=[], packs_per_step=packs, micro_batch=1, world_size=world,
        state=SimpleNamespace(step=0),
    )  # fmt: skip


def test_a_step_larger_than_was_asked_for_is_told(capsys):
    tell_larger_step(step_of(512, 8, world=8))
    assert "a step takes up to 2,048 tokens, not the 512 of train.tokens_per_step" in capsys.readouterr().err
    for run in (step_of(2048, 8, world=8), step_of(1500, 8, world=8), step_of(512, 8, accumulate=1)):
        tell_larger_step(run)
        assert capsys.readouterr().err == ""
