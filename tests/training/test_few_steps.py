"""A first try on little data is told that it is over before it began."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rft.training.decision import Decision
from rft.training.headline import tell_few_steps

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
