"""The tables of what does not go together: every entry refuses its own example, by its keys, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rft.config import schema
from rft.config.compatibility import FOREIGN_KEYS, REFUSED_VALUES, RULES, Rule
from rft.config.load import load_config
from rft.errors import ConfigError


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in extra.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


@pytest.fixture
def minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return {"model": {"path": "org/model"}, "data": {"train": [{"path": "rows.jsonl"}]}}


def without(table: dict[str, Any], path: str) -> dict[str, Any]:
    """The example without one of its keys."""
    name, _, rest = path.partition(".")
    if name not in table:
        return table
    inner = without(table[name], rest) if rest and isinstance(table[name], dict) else None
    return {k: (inner if k == name else v) for k, v in table.items() if k != name or inner}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_refuses_its_example_and_says_what_to_do(rule: Rule, minimal):
    with pytest.raises(ConfigError) as caught:
        load_config(merged(minimal, rule.example))
    assert caught.value.problem == rule.message
    assert caught.value.do == rule.do
    assert rule.keys[0] in caught.value.where


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_about_its_first_key(rule: Rule, minimal):
    load_config(merged(minimal, without(rule.example, rule.keys[0])))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_names_keys_that_exist(rule: Rule):
    for key in rule.keys:
        assert schema.field_at(tuple(key.split("."))) is not None, key


def test_foreign_words_lead_to_keys_that_exist_and_are_none_themselves():
    known = set(schema.all_keys())
    for there, here in FOREIGN_KEYS.items():
        path = tuple(int(part) if part.isdigit() else part for part in here.split("."))
        assert schema.field_at(path) is not None, here
        assert there not in {key.split(".")[-1] for key in known}, there


@pytest.mark.parametrize("key", ["train.precision", "train.master"])
@pytest.mark.parametrize("value", [v for v in REFUSED_VALUES[0].values if isinstance(v, str)])
def test_fp16_is_refused_with_the_reason_however_it_is_spelled(key, value, minimal):  # BO-30
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [f'{key}="{value}"'])
    assert "fp16 is not offered" in caught.value.problem
    assert "loss scaler" in caught.value.problem
    assert 'train.precision = "bf16"' in caught.value.do


@pytest.mark.parametrize(
    "extra", [{"fp16": True}, {"train": {"fp16": True}}, {"train": {"dtype": "float16"}}, {"torch_dtype": "half"}]
)
def test_fp16_in_the_words_of_other_programs_gets_the_same_reason(extra, minimal):  # BO-30
    with pytest.raises(ConfigError, match="fp16 is not offered"):
        load_config(merged(minimal, extra))


def test_the_two_warm_ups_each_alone_are_fine(minimal):  # BO-24: explicit steps and a ratio together are the error
    assert load_config(minimal, ["optim.schedule.warmup_steps=7"]).optim.schedule.warmup_steps == 7
    assert load_config(minimal, ["optim.schedule.warmup_ratio=0.1"]).optim.schedule.warmup_ratio == 0.1
    with pytest.raises(ConfigError, match="both say how long the warm-up is"):
        load_config(minimal, ["optim.schedule.warmup_steps=7", "optim.schedule.warmup_ratio=0.1"])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_two_warm_ups_are_an_error_under_every_schedule(name, minimal):
    with pytest.raises(ConfigError, match="both say how long the warm-up is"):
        load_config(minimal, [f'optim.schedule={{name="{name}", warmup_steps=0, warmup_ratio=0.0}}'])
