"""The schema as data: types in words, the reference page, TOML that comes back as the same config."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft.config import schema
from rft.config.load import load_config
from rft.config.reference import page
from rft.config.show import to_toml

ROOT = Path(__file__).parents[2]


def test_the_reference_page_is_current():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_key_says_what_it_is_for():
    missing = [f"{t.heading} {k.name}" for t in schema.tables() for k in t.keys if not k.help and k.name != "name"]
    assert missing == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("train.max_steps", "an integer above 0"),
        ("optim.lr", 'a number above 0 and of at most 10000 or "auto"'),
        ("adapter.dropout", "a number of at least 0 and below 1"),
        ("adapter.targets", '"all-linear" or a list of strings'),
        ("data.train_on", '"assistant", "last", "all" or a list of names ("system", "user", "assistant" or "tool")'),
        ("optim.schedule", "a table"),
        ("data.train", "a list of tables"),
    ],
)
def test_a_type_is_told_in_words(path, words):
    assert schema.wanted_at(tuple(path.split("."))) == words


def test_the_json_schema_forbids_unknown_keys_and_describes_the_known(tmp_path):
    made = schema.json_schema()
    for name, table in made["$defs"].items():
        assert table["additionalProperties"] is False, name
    assert made["$defs"]["TrainConfig"]["properties"]["seed"]["description"] == "Seed of everything random."


def numbers(node, path=()):
    """(where, schema) of every number."""
    if isinstance(node, dict):
        if node.get("type") in ("number", "integer"):
            yield "/".join(path), node
        for key, value in node.items():
            yield from numbers(value, (*path, key))
    elif isinstance(node, list):
        for value in node:
            yield from numbers(value, path)


def test_every_number_has_an_upper_bound_and_a_lower_one():
    """1e308 is a number too: as GiB it is no integer any more, as a rate it is no number after a step."""
    found = dict(numbers(schema.json_schema()["$defs"]))
    assert len(found) > 45
    for where, node in found.items():
        assert {"maximum", "exclusiveMaximum"} & node.keys(), where
        assert {"minimum", "exclusiveMinimum"} & node.keys(), where


TOMLS = {
    "minimal": "",
    "full": '[adapter]\nname = "none"\n',
    "nested": (
        "[data.train.fields]\nprompt = 'q \"x\" \\\\ y'\n[data.train.roles]\n'my.bot' = 'assistant'\n"
        "[[data.eval]]\npath = 'rows.jsonl'\n[optim]\nlr = 1e-5\n[[optim.groups]]\nmatch = 'embed\\.'\nlr = 1e-6\n"
        "[optim.schedule]\nname = 'wsd'\nwarmup_steps = 2\n[train]\neval_every_steps = 2\nearly_stop = {patience = 2}\n"
        '[log]\ntags = ["tab\\t", "line\\nend", "\\u007f", "é ü"]\n'
    ),
    "adapter to go on with": "[adapter]\npath = '.'\ndropout = 0.1\n",
}


@pytest.mark.parametrize("text", TOMLS.values(), ids=TOMLS.keys())
def test_a_config_written_out_loads_as_the_same_config(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "a.toml").write_text('[model]\npath = "org/m"\n[[data.train]]\npath = "rows.jsonl"\n' + text)
    config = load_config(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text(to_toml(config, {"optim.lr": "two\nlines", "optim.schedule": "a table's"}))
    assert load_config(tmp_path / "b.toml").model_dump() == config.model_dump()
