"""Golden masks, decoded, for the ways in which stock templates of model families write a chat: none has generation tags."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rft.config.model import ModelConfig
from rft.data.prepare import remarks
from rft.errors import DataError
from rft.models.tokenizer import load_tokenizer
from support.data import chat, prepare_rows, text_of, trained_texts, write_tiny_tokenizer

HEADERS = (  # Llama 3: headers, no newline between turns, bos
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INSTRUCT = (  # Mistral: the prompt in brackets, no generation prompt, the system text inside the next user turn
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + ns.system + m.content + ' [/INST]' }}{% set ns.system = '' %}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
TURNS = (  # Gemma: role "model", newline after the end of a turn
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
BARE = (  # DeepSeek: role tokens without newlines, the end token only after answers
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
FORGETS = (  # Qwen 3: reasoning only in the answers after the last question
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUMBERS_TURNS = (  # the beginning tells how long the chat is: no prefix of a longer one
    "{{ messages | length }} messages\n{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ROW = chat("Hi", "Hello", "And now?", "Bye.", system="Be brief")
THINKS = chat("1+1?", "<think>\nadd\n</think>\n\n2", "2+2?", "<think>\nagain\n</think>\n\n4")

GOLDEN = {
    "headers": (HEADERS, ROW, ["Hello<|eot_id|>", "Bye.<|eot_id|>"]),
    "instruct": (INSTRUCT, ROW, [" Hello<|end|>", " Bye.<|end|>"]),
    "turns": (TURNS, ROW, ["Hello<end_of_turn>", "Bye.<end_of_turn>"]),
    "bare": (BARE, ROW, ["Hello<|end|>", "Bye.<|end|>"]),
    "forgets, no reasoning": (FORGETS, ROW, ["Hello<|im_end|>", "Bye.<|im_end|>"]),
    "forgets, reasoning": (FORGETS, THINKS, ["2<|im_end|>", "<think>\nagain\n</think>\n\n4<|im_end|>"]),
}
CONTROL = [
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|User|>",
    "<|Assistant|>",
    "<|end|>",
    "<start_of_turn>",
    "<end_of_turn>",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """With the control tokens of all these families."""
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), bos=True)
    files = load_tokenizer(ModelConfig(path=str(folder), add_tokens=CONTROL))
    raw = json.loads(files.json)
    for token in raw["added_tokens"]:
        token["special"] = True
    special = {**files.special, "eos_token": "<|end|>"}
    return replace(files, json=json.dumps(raw), special=special)


def prepared(tmp_path, tokenizer, template, row, **options):
    tmp_path.mkdir(parents=True, exist_ok=True)
    path = tmp_path / "family.jinja"
    path.write_text(template, "utf-8")
    return prepare_rows(tmp_path, [row], tokenizer, template=str(path), **options)


@pytest.mark.parametrize("name", GOLDEN)
def test_trained_text_of_each_family_is_the_answers_up_to_the_token_that_ends_them(tmp_path, tokenizer, name):
    template, row, spans = GOLDEN[name]
    made = prepared(tmp_path, tokenizer, template, row, thinking="template")
    assert trained_texts(made.train, 0, tokenizer) == spans
    differs = ", earlier turns differ" if name == "forgets, reasoning" else ""
    assert made.report["train"]["mask_methods"] == {f"prefix renders{differs}": 1}
    whole = text_of(made.train, 0, tokenizer)
    assert whole == tokenizer.hf(template).apply_chat_template(row["messages"], tokenize=False)


# ---- BO-07: reasoning of earlier turns


def documents(made, tokenizer):
    return [trained_texts(made.train, index, tokenizer) for index in range(made.train.num_documents)]


FORGETS_TAGGED = FORGETS.replace(
    "text + '<|im_end|>\n' }}", "'' }}{% if m.role == 'assistant' %}{% generation %}{{ text + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ text + '<|im_end|>' }}{% endif %}{{ '\n' }}"
)  # fmt: skip
FIRST, SECOND = "<think>\nadd\n</think>\n\n2<|im_end|>", "<think>\nagain\n</think>\n\n4<|im_end|>"


@pytest.mark.parametrize("template", [FORGETS, FORGETS_TAGGED], ids=["stock", "tagged"])
def test_reasoning_that_the_template_drops_makes_a_document_of_each_turn(tmp_path, tokenizer, template):
    made = prepared(tmp_path, tokenizer, template, THINKS)
    assert documents(made, tokenizer) == [[FIRST], [SECOND]]
    second = text_of(made.train, 1, tokenizer)
    assert "add" not in second.split("again")[0]  # the history as the model will read it
    counts = made.report["train"]
    assert (counts["kept"], counts["split_rows"], counts["documents_of_split_rows"], counts["documents"]) == (
        1,
        1,
        2,
        2,
    )
    assert counts["reasoning_lost"] == 0
    assert any("1 chat became 2 documents" in text for text in remarks(made.report))


@pytest.mark.parametrize("template", [FORGETS, FORGETS_TAGGED], ids=["stock", "tagged"])
def test_reasoning_can_be_put_back_into_the_whole_chat(tmp_path, tokenizer, template):
    made = prepared(tmp_path, tokenizer, template, THINKS, thinking="keep")
    assert documents(made, tokenizer) == [[FIRST, SECOND]]
    messages = THINKS["messages"]
    whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert text_of(made.train, 0, tokenizer) == whole
    assert made.report["train"]["reasoning_lost"] == 0
    assert any("was put back in 1 row" in text for text in remarks(made.report))


@pytest.mark.parametrize("template", [FORGETS, FORGETS_TAGGED], ids=["stock", "tagged"])
def test_reasoning_that_is_dropped_by_choice_is_counted(tmp_path, tokenizer, template):
    made = prepared(tmp_path, tokenizer, template, THINKS, thinking="template")
    assert documents(made, tokenizer) == [["2<|im_end|>", SECOND]]
    counts = made.report["train"]
    assert (counts["reasoning_lost"], counts["reasoning_lost_rows"]) == (1, 1)
    assert any(
        "not written by the template: 1 reasoning block of 1 row, trained without" in text
        for text in remarks(made.report)
    )


def test_chats_without_reasoning_stay_whole_and_last_turns_need_no_split(tmp_path, tokenizer):
    assert documents(prepared(tmp_path / "a", tokenizer, FORGETS, ROW), tokenizer) == [
        ["Hello<|im_end|>", "Bye.<|im_end|>"]
    ]
    last = prepared(tmp_path / "b", tokenizer, FORGETS, THINKS, train_on="last")
    assert documents(last, tokenizer) == [[SECOND]]


def test_reasoning_that_no_render_writes_is_counted_and_makes_no_more_documents_than_turns(tmp_path, tokenizer):
    row = chat("1+1?", "2", "2+2?", "4")
    for message in row["messages"][1::2]:
        message["reasoning_content"] = "counting"
    made = prepared(tmp_path, tokenizer, HEADERS, row)
    assert made.report["train"]["reasoning_lost"] == 2
    assert made.train.num_documents == 1


@pytest.mark.parametrize("name", GOLDEN)
def test_last_turn_alone_is_the_last_span(tmp_path, tokenizer, name):
    template, row, spans = GOLDEN[name]
    made = prepared(tmp_path, tokenizer, template, row, train_on="last")
    assert trained_texts(made.train, 0, tokenizer) == spans[-1:]


def test_template_that_rewrites_the_beginning_is_refused_with_row_and_remedy(tmp_path, tokenizer):
    with pytest.raises(DataError, match="start of the whole chat") as raised:
        prepared(tmp_path, tokenizer, NUMBERS_TURNS, ROW)
    assert "rows.jsonl:1" in raised.value.where
    assert "generation" in raised.value.do


def test_template_that_rewrites_the_beginning_is_counted_where_bad_rows_are_skipped(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no token to train on: 1 rows read, 1 template error"):
        prepared(tmp_path, tokenizer, NUMBERS_TURNS, ROW, on_error="skip")


def test_rows_rendered_by_jinja2_get_the_same_ids_and_masks(tmp_path, tokenizer, monkeypatch):
    for name, (template, row, spans) in GOLDEN.items():
        by_rust = prepared(tmp_path / name / "rust", tokenizer, template, row, thinking="template")
        monkeypatch.setattr("rft.data.prepare.native_difference", lambda *_: "forced by the test")
        by_jinja2 = prepared(tmp_path / name / "jinja2", tokenizer, template, row, thinking="template")
        monkeypatch.undo()
        assert by_jinja2.train.key != by_rust.train.key
        assert trained_texts(by_jinja2.train, 0, tokenizer) == spans
        assert by_jinja2.train.document(0)[0].tolist() == by_rust.train.document(0)[0].tolist()
