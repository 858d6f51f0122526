"""The binding of prepare: exceptions of callbacks, blocks, errors with their parts, a full disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rft import _native
from support.data import CHATML, CHATML_TAGGED, chat, some_chats, tiny_files, write_rows


def request(folder: Path, rows: list, template: str = CHATML, **options) -> dict:
    files = tiny_files(folder / "tokenizer")
    tokenizer = {
        "json": files.json,
        "special": dict(files.special),
        "add_bos": files.add_bos,
        "eos_id": files.eos_id,
        "bos_id": files.bos_id,
        "vocab_size": files.vocab_size,
    }
    source = {"path": str(write_rows(folder / "rows.jsonl", rows))}
    return {"format_version": 2, "sources": [source], "tokenizer": tokenizer, "template": template, **options}


def render_with_jinja2(template: str):
    import jinja2

    compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    calls: list[int] = []

    def render(conversations: list[str]):
        calls.append(len(conversations))
        return [one(json.loads(text)) for text in conversations]

    def one(conversation: dict):
        try:
            return compiled.render(**conversation), []
        except TypeError as error:
            return str(error)

    return render, calls


def test_a_python_renderer_is_called_in_blocks_and_gives_the_same_set(tmp_path):
    rows = some_chats(300)
    native, called = request(tmp_path, rows), request(tmp_path, rows, renderer="callback")
    render, calls = render_with_jinja2(CHATML)
    counts = json.loads(_native.prepare(json.dumps(native), str(tmp_path / "a")))
    again = json.loads(_native.prepare(json.dumps(called), str(tmp_path / "b"), None, render))
    assert (counts["tokens"], counts["trained_tokens"]) == (again["tokens"], again["trained_tokens"])
    (filled,), (rendered,) = counts["sources"], again["sources"]
    assert filled["tokens_by_role"] == rendered["tokens_by_role"]
    assert {"user", "assistant", "template"} == filled["tokens_by_role"].keys()
    assert calls == [2, calls[1]], "a probe of two, then one block"
    assert calls[1] > 300
    one, other = (_native.Store(str(tmp_path / name)) for name in "ab")
    for index in range(one.num_documents):
        assert [part.tolist() for part in one.document(index)[:2]] == [
            part.tolist() for part in other.document(index)[:2]
        ]


def test_character_offsets_of_a_renderer_are_those_of_python(tmp_path):
    spec = request(tmp_path, [chat("é😀?", "ß😀!")], CHATML_TAGGED, renderer="callback")

    def render(conversations):
        chats = [json.loads(text)["messages"] for text in conversations]
        texts = ["".join(str(message["content"]) for message in messages) for messages in chats]
        return [
            (text, [(min(len(str(chat[0]["content"])), len(text)), len(text))])
            for text, chat in zip(texts, chats, strict=True)
        ]

    _native.prepare(json.dumps(spec), str(tmp_path / "set"), None, render)
    ids, trained, _ = _native.Store(str(tmp_path / "set")).document(0)
    assert _native.Tokenizer(spec["tokenizer"]["json"]).decode(ids[trained]) == "ß😀!"


class Odd(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Odd])
def test_an_exception_of_a_callback_comes_through_and_leaves_nothing(tmp_path, kind):
    def raise_it(*_):
        raise kind("from Python")

    rows = some_chats(20)
    spec = json.dumps(request(tmp_path, rows))
    with pytest.raises(kind, match="from Python"):
        _native.prepare(spec, str(tmp_path / "sets" / "a"), raise_it)
    spec = json.dumps(request(tmp_path, rows, renderer="callback"))
    with pytest.raises(kind, match="from Python"):
        _native.prepare(spec, str(tmp_path / "sets" / "a"), None, raise_it)
    assert list((tmp_path / "sets").iterdir()) == []


def test_a_problem_that_a_renderer_returns_is_that_rows_error(tmp_path):
    spec = request(tmp_path, [chat("a", "b")], renderer="callback")
    with pytest.raises(_native.NativeError) as caught:
        _native.prepare(json.dumps(spec), str(tmp_path / "set"), None, lambda block: ["no such role"] * len(block))
    error = caught.value
    assert error.kind == "template"
    assert error.where.endswith("rows.jsonl:1")
    assert "no such role" in error.problem
    assert "data.on_error" in error.do


def test_progress_ends_at_the_whole(tmp_path):
    seen: list[tuple[int, int, int]] = []
    spec = request(tmp_path, some_chats(3000))
    _native.prepare(json.dumps(spec), str(tmp_path / "set"), lambda *step: seen.append(step))
    size = (tmp_path / "rows.jsonl").stat().st_size
    assert len(seen) >= 3
    assert seen == sorted(seen)
    assert seen[-1] == (size, size, 3000)


def test_a_full_disk_is_an_error_of_its_own_kind_and_leaves_nothing(tmp_path):
    spec = request(tmp_path, some_chats(4000))
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    program = """
import resource, sys
from rft import _native
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    _native.prepare(open(sys.argv[1]).read(), sys.argv[2])
except _native.NativeError as error:
    print(error.kind, "|", error.problem, "|", error.do)
"""
    arguments = [sys.executable, "-P", "-c", program, str(tmp_path / "spec.json"), str(tmp_path / "sets" / "a")]
    told = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.startswith("full | no space left")
    assert "data.store" in told
    assert list((tmp_path / "sets").iterdir()) == []


def test_the_key_can_be_printed_and_told_before_preparing(tmp_path):
    spec = request(tmp_path, some_chats(10))
    inputs = json.loads(_native.key_inputs(json.dumps(spec)))
    assert {"sources", "tokenizer", "template", "train_on", "format_version"} <= set(inputs)
    key = _native.store_key(json.dumps(spec))
    known = inputs["sources"][0]["content"]
    assert _native.store_key(json.dumps({**spec, "sources": [{**spec["sources"][0], "xxh3": known}]})) == key
    _native.prepare(json.dumps(spec), str(tmp_path / "set"))
    assert _native.Store(str(tmp_path / "set")).key == key


@pytest.mark.parametrize("weighted", [False, True])
def test_a_reader_written_from_the_documentation_reads_the_set(tmp_path, weighted):
    """The program in docs/store-format.md, run on a set of several shards: plain numpy, nothing of rft."""
    rows = [*some_chats(120), {"messages": [{"role": "assistant", "content": "x " * 400}]}, *some_chats(30, seed=1)]
    if weighted:
        rows[40]["messages"][-1]["loss_weight"] = 0.5
    spec = request(tmp_path, rows, shard_bytes=5000)
    _native.prepare(json.dumps(spec), str(tmp_path / "set"))
    page = (Path(__file__).parents[2] / "docs" / "store-format.md").read_text("utf-8")
    program = page.rsplit("```python\n", 1)[1].split("```")[0]
    names: dict = {}
    exec(program, names)
    documents = list(names["read"](tmp_path / "set"))
    store = _native.Store(str(tmp_path / "set"))
    assert len(list((tmp_path / "set").glob("data-*.rft"))) > 3
    assert len(documents) == store.num_documents == 151
    for index, (ids, trained, weights, origin) in enumerate(documents):
        wanted, bits, factors = store.document(index)
        assert ids.tolist() == wanted.tolist()
        assert trained.tolist() == bits.tolist()
        assert weights.tolist() == ([1.0] * len(ids) if factors is None else factors.tolist())
        assert origin == store.origin(index)
    hashes = names.get("check")
    assert hashes is not None
    hashes(tmp_path / "set")
    shard = tmp_path / "set" / "data-00001.rft"
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(AssertionError):
        hashes(tmp_path / "set")
