"""`rft data prepare | pack | stats | cat | config | completions`: the same sets as `rft prepare`, the same config as the schema."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rft import _native, cli
from rft.config.data import DataConfig, SourceConfig
from rft.config.load import load_config
from rft.data.prepare import prepare
from rft.models.tokenizer import load_tokenizer
from support.command import write_project
from support.data import some_chats, write_rows


@pytest.fixture
def data(capsys):
    """Runs `rft data ...`: exit code, stdout, stderr."""

    def run(*arguments):
        code = cli.run(["data", *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.mark.parametrize(
    "more",
    [
        "",
        "eval_fraction = 0.3",
        'on_error = "skip"\ntrain_on = ["user", "assistant"]\nend_of_turn = "mask"\ndedup = true',
        'template = "chatml"\nthinking = "keep"\ncontrol_tokens = "allow"\nshuffle = "window"',
    ],
)
def test_it_makes_the_sets_of_rft_prepare_from_the_same_config(data, tmp_path, more):
    config = write_project(tmp_path, data=more)
    write_rows(tmp_path / "more.jsonl", some_chats(20, seed=7))
    text = config.read_text().replace(
        "\n[data]", '\n[[data.train]]\npath = "mor*.jsonl"\nweight = 0.5\nmax_rows = 12\n\n[data]'
    )
    config.write_text(text)
    code, out, err = data("prepare", config, "--json")
    assert code == 0, err
    assert "[adapter]" in err, "what is not read is told"
    checked = load_config(config)
    ours = prepare(checked.data, load_tokenizer(checked.model), seed=checked.train.seed)
    for told in json.loads(out):
        part = ours.report[told["part"]]
        assert part["reused"], "the same key, so the same set"
        assert (told["key"], told["read"], told["kept"]) == (part["key"], part["read"], part["kept"])
    code, out, _ = data("prepare", config)
    assert code == 0
    assert "prepared before" in out


def test_flags_do_in_place_of_a_config(data, tmp_path):
    write_project(tmp_path)
    arguments = ["--model", tmp_path / "base", "--data", tmp_path / "train.jsonl", "--store", tmp_path / "sets"]
    code, out, _ = data("prepare", *arguments, "--set", "data.train_on=all", "--json")
    assert code == 0
    (told,) = json.loads(out)
    assert told["trained_tokens"] == told["tokens"] > 0


def test_pack_stats_and_cat_tell_what_a_set_holds(data, tmp_path):
    config = write_project(tmp_path)
    key = json.loads(data("prepare", config, "--json")[1])[0]["key"]
    store = ["--store", tmp_path / "sets"]
    native = _native.Store(str(tmp_path / "sets" / key))
    plan = _native.Plan(native, 64, "stream", "split", 3, 1)
    code, out, _ = data(
        "pack", key[:6], *store, "--seq-len", 64, "--seed", 3, "--epoch", 1, "--to", tmp_path / "p.parquet", "--json"
    )
    assert code == 0
    facts = json.loads(out)
    assert (facts["hash"], facts["packs"], facts["label_tokens"]) == (plan.hash, plan.num_packs, plan.num_label_tokens)
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist()
    assert len(rows) == plan.num_packs
    for number, row in enumerate(rows):
        pieces = plan.pack(number)
        assert row["seq_lengths"] == [length for _, _, length in pieces]
        ids, labels = [], []
        for document, start, length in pieces:
            own, trained, _ = native.document(document)
            kept = np.where(trained, own.astype(np.int64), -100)[start : start + length]
            kept[0] = -100
            ids += own[start : start + length].tolist()
            labels += kept.tolist()
        assert (row["input_ids"], row["labels"]) == (ids, labels)
    code, out, _ = data("stats", key, *store, "--seq-len", 64, "--json")
    told = json.loads(out)
    lengths = native.lengths()
    assert code == 0
    assert (told["tokens"], told["lengths"]["longest"]) == (native.num_tokens, lengths.max())
    assert sum(bar["documents"] for bar in told["lengths"]["histogram"]) == len(lengths)
    for bar in told["lengths"]["histogram"]:
        assert bar["documents"] == ((lengths >= bar["from"]) & (lengths <= bar["to"])).sum()
    assert [packing["packing"] for packing in told["packings"]] == ["stream", "bfd", "even", "sequential", "none"]
    assert "% full: stream" in data("stats", key, *store, "--seq-len", 64)[1]
    code, out, err = data("cat", key, config, *store, "--from", 1, "--count", 2, "--json")
    assert code == 0, err
    shown = [json.loads(line) for line in out.splitlines()]
    assert [entry["document"] for entry in shown] == [1, 2]
    first = some_chats(24)[1]["messages"]
    assert "".join(run["text"] for run in shown[0]["runs"] if run["trained"]).startswith(first[1]["content"])
    assert first[0]["content"] in shown[0]["runs"][0]["text"]
    assert "⟦" in data("cat", key, "--model", tmp_path / "base", *store)[1]


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ("model.path=nowhere/at-all", "nothing of that name is in the hub's cache"),
        ("data.train.0.path=s3://bucket/rows.jsonl", "only this disk"),
        ("data.train.0.rows=loader.py:rows", "need Python"),
        ("data.streaming=true", "data.streaming=false"),
        ("data.packng=bfd", "unknown key `packng`"),
        ("data.template=odd.jinja", "needs Python's jinja2"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(data, tmp_path, sets, told):
    config = write_project(tmp_path)
    (tmp_path / "odd.jinja").write_text("{% for m in messages %}{{ m.content | xmlattr_of_jinja2 }}{% endfor %}")
    code, _, err = data("prepare", config, "--set", sets)
    assert code == 2, err
    assert told in err


# ---- the config against the schema of rft


def example(schema: dict[str, Any]) -> list[Any]:
    """Values that a property of the schema takes."""
    if "enum" in schema:
        return list(schema["enum"])
    if "anyOf" in schema:
        return [value for part in schema["anyOf"] if part.get("type") != "null" for value in example(part)]
    if schema["type"] == "array":
        return [[]] if "$ref" in schema["items"] else [[value] for value in example(schema["items"])]
    if schema["type"] == "object":
        inner = schema["additionalProperties"]
        return [{"a": value} for value in example(inner)]
    small = schema.get("minimum", 0.5)
    return {"string": ["text"], "boolean": [True, False], "integer": [max(small, 7)], "number": [0.5]}[schema["type"]]


WRONG = ["no such word", 7.5, -3, True, ["no such word"], {"a": 7}]
"""Values of every type; a property must refuse those that the schema refuses."""


def properties(model: type) -> dict[str, dict[str, Any]]:
    schema = model.model_json_schema()
    return {name: part for name, part in schema["properties"].items() if name not in ("train", "eval", "path")}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def read(data, tmp_path, table: str, name: str, value: Any) -> dict[str, Any] | None:
    """What `rft data config` reads, or None where it refuses."""
    own = f"{name} = {toml(value)}\n"
    source, rest = (own, "") if table == "source" else ("", own)
    (tmp_path / "c.toml").write_text(f'[model]\npath = "m"\n[[data.train]]\npath = "p"\n{source}[data]\n{rest}')
    code, out, _ = data("config", tmp_path / "c.toml", "--json")
    assert code in (0, 2)
    return None if code else json.loads(out)["data"]


def test_names_and_defaults_are_those_of_the_schema(data, tmp_path):
    (tmp_path / "c.toml").write_text('[model]\npath = "m"\n[[data.train]]\npath = "p"\n[optim]\nlr = 1')
    code, out, err = data("config", tmp_path / "c.toml", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["data"] == DataConfig(train=[SourceConfig(path="p")]).model_dump(mode="json")
    assert told["ignored"] == ["[optim]"]


@pytest.mark.parametrize(("table", "model"), [("data", DataConfig), ("source", SourceConfig)])
def test_types_are_those_of_the_schema(data, tmp_path, table, model):
    for name, schema in properties(model).items():
        for value in example(schema):
            found = read(data, tmp_path, table, name, value)
            assert found is not None, (name, value)
            assert (found if table == "data" else found["train"][0])[name] == value
        for value in WRONG:
            try:
                if table == "data":
                    DataConfig(train=[SourceConfig(path="p")], **{name: value})
                else:
                    SourceConfig(path="p", **{name: value})
                taken = True
            except ValueError:
                taken = False
            assert (read(data, tmp_path, table, name, value) is not None) == taken, (name, value)


def test_every_shell_gets_its_completions(data):
    for shell, word in (("bash", "complete -F"), ("zsh", "#compdef"), ("fish", "complete -c")):
        code, out, _ = data("completions", shell)
        assert code == 0
        assert word in out
        assert "prepare" in out


def test_help_tells_what_each_command_does_with_examples(data):
    for name in ("prepare", "pack", "stats", "cat"):
        code, out, _ = data(name, "--help")
        assert code == 0
        assert f"Usage: rft data {name}" in out
        assert len(out.splitlines()) > 15
    assert "Exit codes" in data("--help")[1]
