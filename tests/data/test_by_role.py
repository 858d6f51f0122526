"""Tokens by data set and role: what each role says, what the template adds, and rows without roles."""

from __future__ import annotations

import json

import pytest

from rft import cli
from support.data import STOP, write_rows, write_tiny_tokenizer

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " user: what is 1 + 1? \n"},
        {"role": "assistant", "content": "It is 2, and 2 is even."},
        {"role": "user", "content": "user"},
        {"role": "assistant", "content": "Yes."},
    ]
}
CALLS = {
    "messages": [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC", "n": 2}}}],
        },
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
    ]
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ '\n[' + call.function.name + '|' + (call.function.arguments | tojson) + ']' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_tiny_tokenizer(tmp_path / "model", template=TEMPLATE)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512}))
    write_rows(tmp_path / "chats" / "a.jsonl", [CHAT])
    write_rows(tmp_path / "chats" / "b.jsonl", [CALLS, CALLS])
    write_rows(tmp_path / "texts.jsonl", [{"text": "Once upon a time."}])
    (tmp_path / "chat.toml").write_text(
        '[model]\npath = "model"\n[data]\nstore = "sets"\n'
        '[[data.train]]\npath = "chats/*.jsonl"\nweight = 2.0\n[[data.train]]\npath = "texts.jsonl"\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words):
    code = cli.run([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def tokens_of(folder, *texts):
    """Tokens of texts that the template writes apart from each other."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def test_stats_tells_tokens_by_data_set_and_role(folder, capsys):
    run(capsys, "prepare", "chat.toml")
    (store,) = [path for path in (folder / "sets").iterdir() if (path / "manifest.json").exists()]
    stats = json.loads(run(capsys, "data", "stats", store, "--json"))
    chats, texts = stats["sets"]
    assert (chats["files"], chats["read"], texts["files"], texts["read"]) == (2, 3, 1, 1)
    words = {
        "system": ["Be brief."],
        "user": [" user: what is 1 + 1? \n", "user", *2 * ["What time is it?"]],
        "assistant": [
            *["It is 2, and 2 is even.", "Yes."],
            *2 * ["Let me look.", "clock", '{"zone": "UTC", "n": 2}', "Noon."],
        ],
        "tool": 2 * ["12:00"],
    }
    # Each row counts twice, for its weight.
    said = {role: 2 * tokens_of(folder, *texts) for role, texts in words.items()}
    assert {role: n for role, n in chats["tokens_by_role"].items() if role != "template"} == said
    # 13 turns of a control token, the role, a line end, what is said, a control token and a line end; and a line end, "[", "|" and "]" around the parts of both calls.
    headers = tokens_of(folder, *(m["role"] for row in (CHAT, CALLS, CALLS) for m in row["messages"])) + 4 * 13
    assert chats["tokens_by_role"]["template"] == 2 * (headers + 2 * 4)
    assert sum(chats["tokens_by_role"].values()) == chats["tokens"]
    assert (
        texts["tokens_by_role"]
        == {"no role": tokens_of(folder, "Once upon a time.", STOP)}
        == {"no role": texts["tokens"]}
    )
    told = run(capsys, "data", "stats", store).splitlines()
    at = next(
        index for index, line in enumerate(told) if line.startswith("tokens of ") and "a.jsonl and 1 more" in line
    )
    assert [line.split()[0] for line in told[at + 1 : at + 6]] == [
        f"{chats['tokens_by_role'][role]:,}" for role in ("system", "user", "assistant", "tool", "template")
    ]
    assert [line.split()[-1] for line in told[at + 1 : at + 6]] == ["system", "user", "assistant", "tool", "template"]


def test_a_set_of_an_earlier_version_says_that_it_has_no_such_counts(folder, capsys):
    run(capsys, "prepare", "chat.toml")
    (store,) = [path for path in (folder / "sets").iterdir() if (path / "manifest.json").exists()]
    strip_counts(store / "manifest.json")
    assert [entry["tokens_by_role"] for entry in json.loads(run(capsys, "data", "stats", store, "--json"))["sets"]] == [
        None
    ]
    assert "not counted by role" in run(capsys, "data", "stats", store)


def strip_counts(path):
    """The manifest as it was before tokens were counted by role, its own hash made anew."""
    xxhash = pytest.importorskip("xxhash")
    head, _, _ = path.read_text("utf-8").rpartition(',\n  "self_xxh3": "')
    manifest = json.loads(head + "\n}")
    for source in manifest["counts"]["sources"]:
        del source["tokens_by_role"], source["set"]
    body = json.dumps(manifest, indent=2, ensure_ascii=False)[: -len("\n}")]
    path.write_text(f'{body},\n  "self_xxh3": "{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n', "utf-8")
